// Builds the report from its data.

const NUM_COLOURS = 8, MAX_WIDENED = 3;
const DASHES = [null, '6 3', '2 3', '8 3 2 3', '1 2'];
const colour = (index) => `var(--c${index % NUM_COLOURS})`;

function shade(index, count) {
  return `color-mix(in oklab, var(--deep), var(--pale) ${count > 1 ? Math.round((index / (count - 1)) * 100) : 0}%)`;
}

function xAxes(curves, places) {
  const pick = (values) => Float64Array.from(places, (index) => values[index]);
  return { steps: pick(curves.steps), tokens: pick(curves.tokens), seconds: pick(curves.seconds) };
}

function seriesOf(data, panel) {
  const found = [], compared = data.runs.length > 1;
  for (const run of data.runs) {
    panel.keys.forEach((key, index) => {
      const label = panel.names[index];
      const shown = compared ? run.colour : panel.ordered ? shade(index, panel.keys.length) : colour(index);
      const shared = {
        label, name: label, run: run.number, colour: shown, legendColour: compared ? 'var(--ink)' : shown,
        shape: compared ? index : 0,
        dash: DASHES[((compared ? index : Math.floor(index / NUM_COLOURS)) + Math.floor(run.number / NUM_COLOURS)) % DASHES.length],
        width: compared && data.runs.length <= MAX_WIDENED ? 1.7 + 2 * (data.runs.length - 1 - run.number) : 0,
        marks: panel.points || key.startsWith('eval/'), full: compared ? (panel.keys.length > 1 ? `${run.name}, ${label}` : run.name) : label,
      };
      const add = (curves, faint) => {
        const one = curves.curves[key];
        if (one) found.push({ ...shared, faint, x: xAxes(curves, curves.places[one.lines]), y: one.values });
      };
      run.rolled_back.forEach((curves) => add(curves, true));
      add(run.curves, false);
    });
  }
  return found;
}

function toolbar(data) {
  const bar = h('nav', { class: 'toolbar', 'aria-label': 'what the charts show' });
  const axes = h('span', { class: 'axes', role: 'group', 'aria-label': 'horizontal axis' });
  for (const [key, label] of [['tokens', 'Tokens'], ['steps', 'Steps'], ['seconds', 'Time']]) {
    const button = h('button', { type: 'button', class: 'chip', 'aria-pressed': String(view.x === key), title: key === 'seconds' ? 'Training time, without checkpoints and pauses' : label }, label);
    button.addEventListener('click', () => {
      view.x = key;
      axes.querySelectorAll('button').forEach((other) => other.setAttribute('aria-pressed', String(other === button)));
      view.cursor = null;
      zoomTo(null);
    });
    axes.append(button);
  }
  const slider = h('input', { type: 'range', min: 0, max: 10, step: 0.5, value: view.smoothing * 100, 'aria-label': 'smoothing, percent of the points to either side' });
  slider.addEventListener('input', () => { view.smoothing = Number(slider.value) / 100; redraw(); });
  const reset = action('Show all', 'The complete horizontal axis', () => zoomTo(null));
  reset.classList.add('reset');
  bar.append(axes, toggle('Log axis', 'Logarithmic horizontal axis', false, (on) => { view.logX = on; zoomTo(null); }),
    h('label', {}, 'Smooth ', slider), toggle('Events', 'Show events on the charts', true, (on) => { view.events = on; redraw(); }), reset);
  if (data.runs.length > 1) {
    const runs = h('span', { class: 'runs-legend', role: 'group', 'aria-label': 'runs' });
    for (const run of data.runs) {
      const chip = toggle(run.name, `Show or hide ${run.name}`, true, (on) => {
        if (on) view.hiddenRuns.delete(run.number);
        else view.hiddenRuns.add(run.number);
        redraw();
      });
      const key = h('i', { class: 'key' });
      key.style.color = run.colour;
      if (run.number >= NUM_COLOURS) key.style.borderTopStyle = 'dashed';
      chip.prepend(key);
      runs.append(chip);
    }
    bar.append(runs);
  }
  return bar;
}

function build(data) {
  data.runs.forEach((run, index) => {
    run.number = index;
    run.colour = colour(index);
    for (const event of run.events) Object.assign(event, { run: index, steps: event.step, title: (data.runs.length > 1 ? `${run.name}: ` : '') + event.kind.replaceAll('_', ' ') });
  });
  const largest = (name) => Math.max(0, ...data.runs.flatMap((run) => [run.curves, ...run.rolled_back].map((curves) => curves[name][curves[name].length - 1] || 0)));
  const smallest = (name) => Math.min(...data.runs.map((run) => run.curves[name].find((value) => value > 0) || Infinity));
  extents = Object.fromEntries(Object.keys(X_UNITS).map((name) => [name, [smallest(name), largest(name)]]));
  const events = data.runs.flatMap((run) => run.events).filter((event) => event.step >= 0 && (data.runs.length === 1 || event.level === 'bad' || event.level === 'notable'));
  const grid = h('div', { class: 'grid' });
  const page = document.getElementById('page');
  const many = data.runs.length > 1, found = findings(data);
  const parts = [header(data), many ? null : found];
  if (data.panels.length) {
    data.panels.forEach((panel, index) => {
      panel.wide = index === 0;
      const clipping = panel.keys.includes('train/grad_norm') ? data.runs[0].clipping : null;
      const chart = new Chart(panel, seriesOf(data, panel), events, clipping);
      chart.figure.classList.toggle('wide', panel.wide);
      grid.append(chart.figure);
    });
    parts.push(toolbar(data), grid);
  }
  parts.push(many ? found : null, eventList(data), evaluations(data), samples(data), settings(data),
    h('footer', {}, 'Drag on a chart to zoom, or pinch on a phone; double-click or press “Show all” to reset. Small triangles at the top edge mark values above the visible range.'));
  page.replaceChildren(...parts.filter(Boolean));
  page.addEventListener('click', (event) => {
    const link = event.target.closest('button[data-step]');
    if (!link || !charts.length) return;
    const curves = data.runs[Number(link.dataset.run)].curves, index = nearest(curves.steps, Number(link.dataset.step));
    const marked = data.runs[Number(link.dataset.run)].events.find((one) => one.step === Number(link.dataset.step));
    if (view.domain) zoomTo(null);
    charts.forEach((chart, number) => { chart.active = number === 0; });
    charts[0].figure.scrollIntoView({ block: 'center', behavior: 'smooth' });
    setTimeout(() => moveCursor(marked ? marked[view.x] : curves[view.x][index]), 50);
  });
  let width = 0;
  new ResizeObserver(() => {
    if (grid.clientWidth !== width) { width = grid.clientWidth; redraw(); }
  }).observe(grid);
  for (const [moment, paper] of [['beforeprint', true], ['afterprint', false]]) {
    addEventListener(moment, () => {
      Object.assign(view, { paper, cursor: null });
      charts.forEach((chart) => chart.draw());
    });
  }
  redraw();
}

build(JSON.parse(document.getElementById('data').textContent));
