// All of the report except the charts. Text from a run is inserted as text, never as markup.

const STATES = { running: 'running', done: 'done', stopped: 'stopped, can be resumed', 'gave up': 'gave up', failed: 'failed', silent: 'silent', new: 'not started' };

const capitalize = (text) => text.charAt(0).toUpperCase() + text.slice(1).replace('mfu', 'MFU');

const WORDS = { acc: 'accuracy', acc_norm: 'normalized accuracy', bpb: 'bits per byte', core: 'CORE', ema_loss: 'EMA loss', hellaswag: 'HellaSwag' };

// The heading of a column of evaluations: its key in words, with the key itself as its title.
function heading(key) {
  const words = key.split('/').slice(1).map((part) => WORDS[part] || part.replaceAll('_', ' '));
  return h('span', { title: key }, words.length > 1 ? words.join(', ') : capitalize(words[0]));
}

// A fact as text, or as a link if it is the address of a page.
function fact(value) {
  return /^https?:\/\//.test(value) ? h('a', { href: value, rel: 'noreferrer' }, value) : value;
}

function section(title, ...children) {
  return h('section', {}, h('h2', {}, title), ...children);
}

function table(head, rows, className) {
  return h('div', { class: 'scroll', tabindex: '0', role: 'region', 'aria-label': className || 'table' },
    h('table', { class: className },
      h('thead', {}, h('tr', {}, ...head.map((cell) => h('th', { scope: 'col' }, cell)))),
      h('tbody', {}, ...rows.map((cells) => h('tr', {}, ...cells.map((cell, index) => h(index ? 'td' : 'th', index ? {} : { scope: 'row' }, cell)))))));
}

function dot(colour) {
  const element = h('i', { class: 'dot' });
  element.style.background = colour;
  return element;
}

function progressBar(run) {
  const share = run.total_tokens ? Math.min(1, run.tokens / run.total_tokens) : null; // no run.json
  const bar = share === null ? [] : [h('div', { class: 'bar' }, h('i', {}))];
  for (const one of bar) one.firstChild.style.width = `${share * 100}%`;
  const steps = run.total_steps ? `step ${run.step.toLocaleString('en')} of ${run.total_steps.toLocaleString('en')}` : `step ${run.step.toLocaleString('en')}`;
  const tokens = run.total_tokens ? `${format(run.tokens, 'tokens')} of ${format(run.total_tokens, 'tokens')} tokens` : `${format(run.tokens, 'tokens')} tokens`;
  const left = run.seconds_left !== null ? `${duration(run.seconds_left)} to go` : '';
  const done = share === null ? '' : `${significant(share * 100, 3)}%`;
  return h('div', { class: 'progress' }, ...bar, h('span', {}, [done, steps, tokens, left].filter(Boolean).join(' · ')));
}

function stateChip(run) {
  return h('span', { class: `state ${run.state.replace(' ', '-')}`, title: run.why }, STATES[run.state] || run.state);
}

function tiles(run) {
  return h('dl', { class: 'tiles' }, ...run.figures.map(([name, value, note]) => h('div', { class: note.length > 60 ? 'wide' : null }, h('dt', {}, name), h('dd', {}, value), h('small', {}, note))));
}

function header(data) {
  const runs = data.runs, age = h('p', { class: 'age' });
  const update = () => {
    const seconds = Math.max(0, Date.now() / 1000 - data.written_at);
    const live = runs.some((run) => run.state === 'running');
    age.textContent = `Written ${data.written.slice(0, 16).replace('T', ' ')}` + (live && seconds > 60 ? `, ${duration(seconds)} ago: reload to update.` : '.');
  };
  update();
  setInterval(update, 30000);
  if (runs.length === 1) {
    const run = runs[0];
    document.title = `${run.name}: ${STATES[run.state] || run.state}`;
    return h('header', {}, h('div', { class: 'name' }, h('h1', {}, run.name), stateChip(run)),
      run.why && run.state !== 'running' ? h('p', { class: 'why' }, run.why) : null, progressBar(run), tiles(run),
      h('dl', { class: 'facts' }, ...run.facts.map(([name, value]) => h('div', {}, h('dt', {}, name), h('dd', {}, fact(value))))), age);
  }
  document.title = runs.map((run) => run.name).join(', ');
  const names = [...new Set(runs.flatMap((run) => run.figures.map(([name]) => name)))];
  const rows = runs.map((run) => [h('span', { class: 'run' }, dot(run.colour), run.name), stateChip(run), format(run.tokens, 'tokens'),
    ...names.map((name) => { const found = run.figures.find(([other]) => other === name); return found ? h('span', { title: found[2] }, found[1]) : '–'; })]);
  return h('header', {}, h('div', { class: 'name' }, h('h1', {}, `${runs.length} runs`)), table(['Run', 'State', 'Tokens', ...names], rows, 'runs'), ...agreement(data), age);
}

function agreement(data) {
  const lines = data.agreement.map((one) => h('p', { class: 'agreement' }, h('b', {}, `${data.runs[0].name} and ${one.run}: `),
    one.largest === 0 ? `training losses are bit-identical at all ${one.steps.toLocaleString('en')} common steps.`
      : `training losses differ by at most ${significant(one.largest, 3)} (relatively ${significant(one.relative, 2)}, at step ${one.at.toLocaleString('en')}) over ${one.steps.toLocaleString('en')} common steps.`));
  return lines.length > 2 ? [h('details', {}, h('summary', {}, `How far the training losses are from those of ${data.runs[0].name}`), ...lines)] : lines;
}

function findings(data) {
  const found = data.runs.flatMap((run) => run.findings.map((finding) => ({ ...finding, run })));
  const problems = data.runs.flatMap((run) => run.problems.map((problem) => ({ problem, run })));
  if (!found.length && !problems.length) return null;
  const name = (run) => (data.runs.length > 1 ? `${run.name}: ` : '');
  const advised = new Set();  // each piece of advice is shown once
  const advice = (one) => { const first = !advised.has(one.advice); advised.add(one.advice); return first ? ` ${one.advice}` : ''; };
  return section('Findings', h('ul', { class: 'findings' },
    ...found.map((one) => h('li', { class: one.kind }, h('b', {}, name(one.run) + capitalize(one.kind.replaceAll('_', ' '))), h('button', { type: 'button', class: 'link', 'data-step': one.step, 'data-run': one.run.number }, `step ${one.step.toLocaleString('en')}`), ' ', one.text, advice(one))),
    ...problems.map((one) => h('li', { class: 'unread' }, h('b', {}, `${name(one.run)}Could not be read`), ' ', one.problem))));
}

function eventList(data) {
  const many = data.runs.length > 1;
  const rows = data.runs.flatMap((run) => run.events.map((event) => ({ event, run })));
  if (!rows.length) return null;
  const left = data.runs.reduce((sum, run) => sum + run.events_left_out, 0);
  const body = (all) => table([...(many ? ['Run'] : []), 'Step', 'What', '', 'When'], rows.filter(({ event }) => all || event.level !== 'quiet').map(({ event, run }) => [
    ...(many ? [h('span', { class: 'run' }, dot(run.colour), run.name)] : []),
    event.step < 0 ? '' : h('button', { type: 'button', class: 'link', 'data-step': event.step, 'data-run': run.number }, event.step.toLocaleString('en')),
    h('span', { class: `kind ${event.level}` }, event.title), event.words, h('span', { class: 'when' }, (event.time || '').slice(0, 19).replace('T', ' '))]), 'events');
  const host = h('div', {}, body(false));
  const quiet = rows.filter(({ event }) => event.level === 'quiet').length;
  const all = quiet ? toggle(`Show ${quiet} checkpoints and uploads too`, 'Events of normal operation', false, (on) => host.replaceChildren(body(on))) : null;
  return section('Events', all, host, left ? h('p', { class: 'about' }, `${left.toLocaleString('en')} older events are in events.jsonl only.`) : null);
}

function evaluations(data) {
  const runs = data.runs.filter((run) => run.evaluations.rows.length);
  if (!runs.length) return null;
  const tables = runs.map((run) => {
    const { keys, better, units, rows } = run.evaluations;
    const known = (value) => value !== null && value !== undefined;
    const best = keys.map((key, index) => {
      const values = rows.map((row) => row[index + 2]).filter(known);
      return better[index] && values.length > 1 ? Math[better[index] === 'lower' ? 'min' : 'max'](...values) : null;
    });
    const has = (row) => keys.some((key, index) => known(best[index]) && row[index + 2] === best[index]);
    const shown = rows.length > 40 ? rows.filter((row, index) => index % Math.ceil(rows.length / 40) === 0 || index === rows.length - 1 || has(row)) : rows;
    const cells = [...shown].reverse().map((row) => [row[0].toLocaleString('en'), format(row[1], 'tokens'), ...keys.map((key, index) => {
      const value = row[index + 2];
      if (!known(value)) return '–';
      const text = units[index] === 'share' || /\/(acc|acc_norm|exact_match)/.test(key) ? format(value, 'share') : significant(value, 5);
      return value === best[index] ? h('b', { class: 'best', title: 'best' }, text) : text;
    })]);
    return h('div', {}, data.runs.length > 1 ? h('h3', {}, dot(run.colour), run.name) : null, table(['Step', 'Tokens', ...keys.map(heading)], cells, 'evaluations'));
  });
  return section('Evaluations', ...tables);
}

function samples(data) {
  const parts = data.runs.filter((run) => run.samples.length).map((run) => {
    const times = [...new Set(run.samples.flatMap((prompt) => prompt.texts.map(([step]) => step)))].sort((a, b) => a - b);
    const where = h('output', {});
    const slider = h('input', { type: 'range', min: 0, max: times.length - 1, value: times.length - 1, 'aria-label': 'training time of the samples' });
    const strips = run.samples.map((prompt) => {
      const cards = prompt.texts.map(([step, tokens, text, how]) => h('article', { 'data-step': step, title: how }, h('h4', {}, `step ${step.toLocaleString('en')} · ${format(tokens, 'tokens', 3)} tokens`), h('p', {}, text)));
      return h('div', { class: 'prompt' }, h('h3', {}, prompt.prompt || '(empty prompt)'), h('div', { class: 'strip', tabindex: '0', role: 'region', 'aria-label': `samples of ${prompt.prompt}` }, ...cards));
    });
    const show = () => {
      const step = times[Number(slider.value)];
      where.textContent = `step ${step.toLocaleString('en')}`;
      for (const strip of strips) {
        for (const card of strip.querySelectorAll('article')) {
          const now = Number(card.dataset.step) === step;
          card.classList.toggle('now', now);
          if (now) card.parentElement.scrollTo({ left: card.offsetLeft - card.parentElement.clientWidth + card.offsetWidth + 12 });
        }
      }
    };
    slider.addEventListener('input', show);
    requestAnimationFrame(show);
    return h('div', {}, data.runs.length > 1 ? h('h3', {}, dot(run.colour), run.name) : null,
      times.length > 1 ? h('label', { class: 'time' }, 'Training time ', slider, where) : null, ...strips);
  });
  return parts.length ? section('Samples', ...parts) : null;
}

function settings(data) {
  const names = data.runs.map((run) => run.name), parts = [];
  if (data.runs.length > 1) {
    parts.push(data.differences.length ? table(['Setting', ...names], data.differences.map((one) => [one.key, ...one.values.map((value) => value ?? '–')]), 'settings') : h('p', {}, 'All settings are equal.'));
  }
  const keys = [...new Set(data.settings.flatMap(Object.keys))];
  if (keys.length) {
    parts.push(h('details', {}, h('summary', {}, `All ${keys.length} settings`), table(['Setting', ...(names.length > 1 ? names : ['Value'])], keys.map((key) => [key, ...data.settings.map((flat) => flat[key] ?? '–')]), 'settings')));
  }
  if (!parts.length) return null;
  const found = section(names.length > 1 ? 'Settings that differ' : 'Settings', ...parts);
  found.className = names.length > 1 ? '' : 'screen';
  return found;
}
