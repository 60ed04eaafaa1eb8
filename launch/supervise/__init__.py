"""Run a launch as a child process, classify how it ended, and restart it: `launch supervise`.

Observes a run only through its processes, heartbeats, events and checkpoint names. Must not import
torch, DeepSpeed or the commands built on it (`launch.doctor`, `launch.render`).
"""
