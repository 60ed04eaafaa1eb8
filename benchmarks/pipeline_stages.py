"""Measures pipeline stages beside ZeRO-3 and ZeRO-1: bytes, idle passes, memory, and seconds.

    python -m benchmarks.pipeline_stages                       # on this machine
    python -m benchmarks.pipeline_stages --links 1000 100      # two hosts, linked at so many Mbit/s

Each rank is pretrain.py in a process of its own, which counts what it sends, and records the order
of its passes (`counted_ranks`). Idle passes are counted in this order, every pass with the same
duration and transfers with none, since four ranks on two cores say nothing of time. With `--links`
ranks run in namespaces of their own, and the link of one is shaped by tc; needs root and the
packages of tests/cluster/hosts.py.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from itertools import count as count_up
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.counted_ranks import (
    BACKWARD,
    EXCHANGE,
    FORWARD,
    ZERO_3,
    Contender,
    Counted,
    Recipe,
    started,
)
from benchmarks.machine import hardware
from benchmarks.random_shard import write_random_shard
from benchmarks.tables import parser, show, table

RANKS = 4
STAGED = (Contender(1, stages=2), Contender(1, stages=4))
HEIGHTS = (1, 2, 4)  # micro-batches of a rank in a step, for the idle passes
TITLES = {
    "bytes": "Bytes", "memory": "Memory", "losses": "Losses", "idle": "Idle passes",
    "chunks": "Two chunks of layers a rank",
}  # fmt: skip
# The head has as many multiply-adds as a block, so that 4 stages of 12 have equal costs.
WIDTH, BLOCKS = 256, 11
LINK_WIDTH, LINK_BLOCKS, LINK_SEQ_LEN, LINK_SECONDS = 384, 7, 128, 2.0


def config(width: int, blocks: int) -> dict[str, Any]:
    """Return a Llama whose embeddings, head and blocks have 13 width^2 parameters each."""
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 13 * width,
        "hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": blocks,
        "num_attention_heads": width // 64, "num_key_value_heads": width // 64,
        "max_position_embeddings": 512, "tie_word_embeddings": False,
    }  # fmt: skip


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--steps", type=int, default=3, help="of a contender in a round")
    flags.add_argument("--rounds", type=int, default=2)
    flags.add_argument("--sections", nargs="+", choices=TITLES, default=list(TITLES))
    flags.add_argument("--links", type=float, nargs="+", metavar="MBIT")
    flags.add_argument("--ranks_per_host", type=int, nargs="+", default=[1, 2])
    arguments = flags.parse_args()
    with tempfile.TemporaryDirectory() as scratch_name:
        scratch = Path(scratch_name)
        if arguments.links:
            paragraphs = over_links(scratch, arguments)
        else:
            paragraphs = on_one_host(scratch, arguments)
    show(paragraphs, hardware(), arguments.output)


def recipe_of(scratch: Path, width: int, blocks: int, **sizes: Any) -> Recipe:
    """Write a config and random ids into `scratch`."""
    from zerolm.model.model import Model

    path = scratch / f"llama-{width}.json"
    path.write_text(json.dumps(config(width, blocks)))
    write_random_shard(scratch / path.stem, path, 200_000)
    return Recipe(path, Model.load(str(path)).num_parameters, **sizes)


# -------------------------------------------------------------------------------------------------
# Bytes, idle passes and memory


def on_one_host(scratch: Path, arguments: argparse.Namespace) -> list[str]:
    sizes = {"seq_len": 256, "micro_batch_size": 2, "accumulation": 4, "steps": arguments.steps}
    recipe = recipe_of(scratch, WIDTH, BLOCKS, **sizes)
    exact = recipe._replace(precision="fp32")

    def each(
        contenders: Sequence[Contender], recipe: Recipe, **more: Any
    ) -> dict[Contender, Counted]:
        return {one: started(one, recipe, RANKS, scratch, **more) for one in contenders}

    sections: dict[str, Callable[[], list[str]]] = {
        "bytes": lambda: [sent(each((ZERO_3, Contender(3), Contender(1), *STAGED), recipe))],
        "memory": lambda: [memory_of(recipe, each(STAGED, recipe, traces_memory=True))],
        "losses": lambda: [losses(each((Contender(1), ZERO_3, *STAGED), exact))],
        "idle": lambda: [idle(scratch, recipe)],
        "chunks": lambda: [interleaving(), interleaving_planned()],
    }
    paragraphs = [
        f"{recipe.num_parameters:,} parameters; a step has {recipe.accumulation} micro-batches of "
        f"{recipe.micro_batch_size} x {recipe.seq_len} tokens for each of {RANKS} ranks."
    ]
    for name in arguments.sections:
        paragraphs += [f"## {TITLES[name]}", *sections[name]()]
        print("\n\n".join(paragraphs[-2:]), flush=True)
    return paragraphs


def sent(found: Mapping[Contender, Counted]) -> str:
    base = found[ZERO_3]
    rows = []
    for contender, each in found.items():
        most = max(sum(of_rank.values()) for of_rank in each.sent)
        rows.append(
            [
                contender.name,
                f"{each.mean_bytes / 1e6:.2f}",
                f"{most / 1e6:.2f}",
                f"{each.mean_bytes / base.mean_bytes:.4f}",
                f"{each.seconds:.2f}",
                ", ".join(
                    f"{name} {value / 1e6:.2f}"
                    for name, value in sorted(each.mean_sent.items(), key=lambda one: -one[1])
                    if value > 5e3
                ),
            ]
        )
    head = [
        f"profile, {base.precision}", "MB sent by a rank and step", "by the one that sends most",
        "of ZeRO-3's", "seconds a step", "MB by collective",
    ]  # fmt: skip
    return table(head, rows)


def losses(found: Mapping[Contender, Counted]) -> str:
    base = found[Contender(1)].values("train/loss")
    rows = []
    for contender, each in found.items():
        own = each.values("train/loss")
        largest = max(abs(a / b - 1) for a, b in zip(own, base, strict=True))
        rows.append([contender.name, ", ".join(f"{loss:.8f}" for loss in own), f"{largest:.1e}"])
    precision = found[Contender(1)].precision
    return table([f"profile, {precision}", "losses", "largest difference from ZeRO-1's"], rows)


# ---- Idle passes


def idle(scratch: Path, recipe: Recipe) -> str:
    """Return a table of counted idle passes for several numbers of micro-batches."""
    rows = []
    for contender in STAGED:
        for accumulation in HEIGHTS:
            sizes = recipe._replace(accumulation=accumulation, steps=1, micro_batch_size=1)
            each = started(contender, sizes, RANKS, scratch)
            stages, count = contender.stages, accumulation * contender.stages
            orders = dict(enumerate(each.passes))
            counted = [idle_share(orders, backward) for backward in (1.0, 2.0)]
            formula = (stages - 1) / (count + stages - 1)
            rows.append(
                [
                    f"{stages} x {RANKS // stages}",
                    count,
                    *(f"{share:.4f}" for share in counted),
                    f"{formula:.4f}",
                    f"{counted[1] / (1 - counted[1]):.4f}",
                    f"{(stages - 1) / count:.4f}",
                    ", ".join(str(most_stored(passes)) for passes in orders.values()),
                ]
            )
    head = [
        "stages x replicas", "m", "idle share, counted", "backward passes twice as long",
        "(p - 1) / (m + p - 1)", "idle / busy, counted", "(p - 1) / m", "stored micro-batches",
    ]  # fmt: skip
    return table(head, rows)


def idle_share(orders: Mapping[int, Sequence[Any]], backward: float = 1.0) -> float:
    """Return the share of the time that ranks wait, if a forward pass takes 1, and transfers 0.

    An exchange ends when the neighbours have begun the exchanges with the other halves of its
    transfers.

    Args:
        orders: {rank: its passes and exchanges}, as `counted_ranks.recorded_passes` has them.
        backward: duration of a backward pass.
    """
    clocks = dict.fromkeys(orders, 0.0)
    places = dict.fromkeys(orders, 0)
    begun: dict[tuple[int, int, int, bool], float] = {}  # of (sender, receiver, number, is_send)
    counts: dict[tuple[int, int, bool], int] = {}
    pending: dict[int, list[tuple[int, int, int, bool]]] = {}
    busy, is_moving = 0.0, True
    while is_moving:
        is_moving = False
        for rank, passes in orders.items():
            if places[rank] == len(passes):
                continue
            kind, what = passes[places[rank]]
            if kind != EXCHANGE:
                duration = backward if kind == BACKWARD else 1.0
                clocks[rank] += duration
                busy += duration
            else:
                if rank not in pending:
                    pending[rank] = []
                    for sends, peer in what:
                        channel = (rank, peer) if sends else (peer, rank)
                        number = counts.get((*channel, sends), 0)
                        counts[(*channel, sends)] = number + 1
                        begun[(*channel, number, sends)] = clocks[rank]
                        pending[rank].append((*channel, number, not sends))
                if not all(each in begun for each in pending[rank]):
                    continue
                clocks[rank] = max(clocks[rank], *(begun[each] for each in pending.pop(rank)))
            places[rank] += 1
            is_moving = True
    assert all(places[rank] == len(passes) for rank, passes in orders.items()), "a deadlock"
    return 1 - busy / (len(orders) * max(clocks.values()))


# ---- Interleaving


def interleaved(stages: int, count: int, chunks: int) -> dict[int, list[tuple[str, int, int]]]:
    """Return each rank's passes, as (FORWARD or BACKWARD, micro-batch, part of the model), if it
    has several chunks of layers: rank r has the parts r, r + stages, ...

    Source: Narayanan et al. 2021 (arXiv 2104.04473), figure 4; 1 chunk is 1F1B.
    """
    total = count * chunks

    def place(number: int, kind: str) -> tuple[int, int]:
        turn, within = divmod(number, stages * chunks)
        chunk, micro = divmod(within, stages)
        return turn * stages + micro, chunk if kind == FORWARD else chunks - 1 - chunk

    found = {}
    for rank in range(stages):
        ahead = (
            stages - rank - 1 if chunks == 1 else 2 * (stages - rank - 1) + (chunks - 1) * stages
        )
        ahead = min(ahead, total)
        kinds = [FORWARD] * ahead + [FORWARD, BACKWARD] * (total - ahead) + [BACKWARD] * ahead
        numbers = {FORWARD: count_up(), BACKWARD: count_up()}
        places = [(kind, *place(next(numbers[kind]), kind)) for kind in kinds]
        found[rank] = [(kind, micro, chunk * stages + rank) for kind, micro, chunk in places]
    return found


def interleaving() -> str:
    """Return a table of what two chunks of layers a rank would save and cost, on 4 ranks."""
    rows = []
    for count in (4, 8, 16, 32, 64):
        shares = []
        stored = []
        for chunks in (1, 2):
            orders = interleaved(RANKS, count, chunks)
            shares.append(idle_of(orders, RANKS * chunks, chunks))
            stored.append(max(most_stored(orders[rank]) / chunks for rank in orders))
        boundaries = [RANKS * chunks - 1 for chunks in (1, 2)]
        rows.append(
            [
                count,
                *(f"{share:.4f}" for share in shares),
                f"{(1 - shares[0]) / (1 - shares[1]):.3f}",
                f"{boundaries[1] / boundaries[0]:.2f}",
                f"{stored[1] / stored[0]:.3f}",
            ]
        )
    head = [
        "m", "idle share, 1F1B", "two chunks", "of 1F1B's time, transfers free",
        "bytes between stages, of 1F1B's", "stored activations of the first rank, of 1F1B's",
    ]  # fmt: skip
    return table(head, rows)


def interleaving_planned() -> str:
    """Return a table of planned seconds of a 70B on 64 H100, with a chunk for each stage and two.

    With two, a stage waits half as long while the pipeline fills, and sends twice as much.
    """
    from launch.estimate import pipeline
    from launch.estimate.planned_run import plan_run
    from launch.estimate.search import profile_of
    from launch.estimate.step_time import step_time
    from zerolm.ds_config.profile import Profile
    from zerolm.model.model import Model
    from zerolm.parts.settings import RunSettings
    from zerolm.plan import hardware as devices

    model = Model.load(str(ROOT / "model_configs/llama-70b.json"))
    rows = []
    for tokens in (1 << 20, 1 << 22):
        for gigabits in (50, 100, 200, 400, 3200):
            device = devices.load("H100", {"inter_node": gigabits * 1e9 / 8 / 8})
            seconds = []
            for stages, micro in ((8, 1), (1, 4)):
                profile = profile_of(1 if stages > 1 else 3, "none", device)
                block = {"pipeline": {"stages": stages}} if stages > 1 else {}
                settings = RunSettings(
                    seq_len=4096, batch_tokens=tokens, total_tokens=tokens, micro_batch_size=micro,
                    gradient_checkpointing=True,
                    explicit=frozenset({"batch_tokens", "micro_batch_size"}),
                )  # fmt: skip
                profile = Profile.parse({**profile.json, **block}, profile.name)
                run = plan_run(model, profile, settings, device, 64, 8)
                found = step_time(run)
                seconds.append(found.seconds)
                if stages > 1:
                    sent, filling = pipeline.transfer_seconds(run), pipeline.idle_ratio(run)
                    passes = found.compute + found.elementwise + sent
                    seconds.append(
                        found.seconds - passes * (1 + filling) + (passes + sent) * (1 + filling / 2)
                    )
            best = min(range(3), key=lambda each: seconds[each])
            rows.append(
                [
                    f"{tokens:,}",
                    gigabits,
                    *(f"{each:.1f}" for each in seconds),
                    ("stages", "two chunks", "ZeRO-3")[best],
                ]
            )
    head = ["tokens a step", "Gbit/s a host", "8 stages, s", "two chunks", "ZeRO-3", "fastest"]
    return table(head, rows)


def most_stored(passes: Sequence[Any]) -> int:
    stored = [{FORWARD: 1, BACKWARD: -1}.get(kind, 0) for kind, *_ in passes]
    return max(accumulate(stored))


def idle_of(orders: Mapping[int, Sequence[Any]], parts: int, chunks: int) -> float:
    """Return the share of the time that ranks wait for the previous part of the model, or the next
    one, if a backward pass takes twice as long as a forward pass, and transfers nothing.
    """
    ended: dict[tuple[str, int, int], float] = {}
    clocks, places = dict.fromkeys(orders, 0.0), dict.fromkeys(orders, 0)
    while any(places[rank] < len(passes) for rank, passes in orders.items()):
        for rank, passes in orders.items():
            while places[rank] < len(passes):
                kind, micro, part = passes[places[rank]]
                needed = [(kind, micro, part - 1 if kind == FORWARD else part + 1)]
                if kind == BACKWARD:
                    needed.append((FORWARD, micro, part))
                needed = [each for each in needed if 0 <= each[2] < parts]
                if not all(each in ended for each in needed):
                    break
                duration = (2.0 if kind == BACKWARD else 1.0) / chunks
                begin = max(clocks[rank], *(ended[each] for each in needed), 0.0)
                clocks[rank] = ended[kind, micro, part] = begin + duration
                places[rank] += 1
    busy = sum(3.0 / chunks * len(passes) / 2 for passes in orders.values())
    return 1 - busy / (len(orders) * max(clocks.values()))


# ---- Memory


def memory_of(recipe: Recipe, traced: Mapping[Contender, Counted]) -> str:
    """Return a table of the traced bytes of each stage beside those of the plan."""
    from zerolm.distributed.layout import Layout
    from zerolm.ds_config.profile import Profile
    from zerolm.model.model import Model
    from zerolm.plan import memory

    model = Model.load(str(recipe.config))
    rows = []
    for contender, each in traced.items():
        stages, count = contender.stages, recipe.accumulation * contender.stages
        layout = Layout(RANKS, stages=stages)
        profile = Profile.parse(each.profile)
        activations = memory.activations_of(model.config, recipe.seq_len, profile.precision)
        planned = memory.stage_bytes(
            model.shapes, profile, layout, activations, False, recipe.micro_batch_size, count
        )
        for stage, bytes_planned in enumerate(planned):
            states = memory.model_states(model.shapes, profile, layout, stage=stage)
            replicas = range(stage * layout.replicas, (stage + 1) * layout.replicas)
            live = [each.live_bytes[rank] for rank in replicas]
            peak, before = (max(one[key] for one in live) for key in ("peak", "states"))
            rows.append(
                [
                    f"{stages} x {layout.replicas}",
                    stage,
                    profile.stage_layers[stage],
                    f"{before / 1e6:.1f}",
                    f"{states.device / 1e6:.1f}",
                    f"{peak / 1e6:.1f}",
                    f"{bytes_planned / 1e6:.1f}",
                    f"{bytes_planned / peak - 1:+.1%}",
                ]
            )
    head = [
        "stages x replicas", "stage", "blocks", "states, MB", "planned", "peak of live tensors, MB",
        "planned", "error",
    ]  # fmt: skip
    return table(head, rows)


# -------------------------------------------------------------------------------------------------
# Links


def over_links(scratch: Path, arguments: argparse.Namespace) -> list[str]:
    from tests.cluster.hosts import Cluster, missing

    if reason := missing():
        raise SystemExit(reason)
    paragraphs = []
    with Cluster(scratch / "hosts", 2) as cluster:
        shared = cluster.directory / "shared"
        shared.mkdir()
        sizes = {"seq_len": LINK_SEQ_LEN, "micro_batch_size": 1, "steps": arguments.steps}
        recipe = recipe_of(shared, LINK_WIDTH, LINK_BLOCKS, accumulation=2, **sizes)
        rows = []
        for each in arguments.ranks_per_host:
            for megabits in arguments.links:
                cluster.slow("node2", megabits)
                measured = link_of(cluster, megabits)
                rows += rates(cluster, recipe, each, megabits, measured, arguments.rounds)
                print(rows[-1], flush=True)
                cluster.slow("node2", 0)
        paragraphs += [
            f"{recipe.num_parameters:,} parameters; a step has {recipe.accumulation} micro-batches "
            f"of {recipe.micro_batch_size} x {recipe.seq_len} tokens for each rank; "
            f"{arguments.rounds} rounds of {arguments.steps} steps.",
            table(
                [
                    "link, Mbit/s", "measured, each way", "hosts x ranks", "stages x replicas",
                    "ZeRO-3, s a step", "stages", "of ZeRO-3's, by round",
                    "MB that a host sends the other in a step: ZeRO-3",
                    "a rank, in rings", "stages", "a rank, in rings",
                ],
                rows,
            ),
        ]  # fmt: skip
    return paragraphs


def rates(
    cluster: Any, recipe: Recipe, per_host: int, megabits: float, measured: str, rounds: int
) -> Iterator[list[str]]:
    """Yield a row with the seconds of a step; contenders take turns, each time in another order."""
    staged = Contender(1, stages=len(cluster.names))
    contenders = [ZERO_3, staged]
    ranks = per_host * len(cluster.names)
    found: dict[Contender, list[Counted]] = {each: [] for each in contenders}
    for _ in range(rounds):
        for each in contenders:
            run = on_hosts(cluster, per_host)
            found[each].append(started(each, recipe, ranks, cluster.directory / "shared", run=run))
            print(
                f"{megabits:g} Mbit/s, {per_host} a host: {each.name}: "
                f"{found[each][-1].seconds:.2f} s",
                flush=True,
            )
        contenders.reverse()
    seconds = {each: [one.seconds for one in counted] for each, counted in found.items()}
    rings, wire = (
        {each: of(counted[0]) / 1e6 for each, counted in found.items()}
        for of in (lambda one: one.mean_bytes, lambda one: max(one.link_bytes))
    )
    ratios = [ours / base for ours, base in zip(seconds[staged], seconds[ZERO_3], strict=True)]
    yield [
        f"{megabits:g}",
        measured,
        f"{len(cluster.names)} x {per_host}",
        f"{staged.stages} x {ranks // staged.stages}",
        *(f"{statistics.median(seconds[each]):.2f}" for each in (ZERO_3, staged)),
        ", ".join(f"{ratio:.2f}" for ratio in ratios),
        *(f"{of[each]:.1f}" for each in (ZERO_3, staged) for of in (wire, rings)),
    ]


def on_hosts(cluster: Any, per_host: int) -> Callable[..., None]:
    """Return a function that runs the ranks of `counted_ranks` on the hosts of a cluster."""
    from benchmarks import counted_ranks
    from tests.launching import free_port

    def run(ranks: int, *arguments: object) -> None:
        first = next(iter(cluster.addresses.values()))
        variables = {
            "MASTER_ADDR": first, "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(per_host), "CROSS_SIZE": str(len(cluster.names)),
            "GLOO_SOCKET_IFNAME": "eth0", "DS_ACCELERATOR": "cpu",
        }  # fmt: skip
        script = Path(counted_ranks.__file__)
        command = [sys.executable, script, *arguments]
        logs = [tempfile.TemporaryFile("w+", errors="replace") for _ in range(ranks)]
        processes = []
        for rank, log in enumerate(logs):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank % per_host)}
            own["CROSS_RANK"] = str(rank // per_host)
            name = cluster.names[rank // per_host]
            processes.append(
                cluster.start(name, command, {**variables, **own}, stdout=log, stderr=log)
            )
        codes = [process.wait(timeout=900) for process in processes]
        for log in logs:
            log.seek(0)
        assert not any(codes), [log.read()[-3000:] for log in logs]

    return run


SENDER = """import socket, sys
with socket.create_connection((sys.argv[1], 5001)) as sent:
    sent.sendall(bytes(int(sys.argv[2])))
"""
RECEIVER = """import socket, time
with socket.create_server(("", 5001)) as server:
    print("ready", flush=True)
    received, _ = server.accept()
    size, start = 0, time.perf_counter()
    while part := received.recv(1 << 20):
        size += len(part)
    print(size * 8 / 1e6 / (time.perf_counter() - start))
"""


def link_of(cluster: Any, megabits: float) -> str:
    """Return what a TCP connection sends between the hosts, in Mbit/s, one way and the other."""
    found = []
    for receiver, sender in (cluster.names[:2], cluster.names[1::-1]):
        process = cluster.start(
            receiver, ["/usr/bin/env", "python3", "-c", RECEIVER], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout.readline() == "ready\n"
        size = int(megabits * 1e6 / 8 * LINK_SECONDS)
        cluster.run(sender, "python3", "-c", SENDER, cluster.addresses[receiver], size)
        found.append(float(process.stdout.readline()))
        process.wait()
    return " and ".join(f"{each:.0f}" for each in found)


if __name__ == "__main__":
    main()
