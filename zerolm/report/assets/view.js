// The state that all panels share: the x-axis, its visible part, and the cursor.

// `cursor` is a position on the x-axis, null without one; `domain` is the visible part, null for all.
const view = { x: 'tokens', logX: false, domain: null, smoothing: 0.02, events: true, cursor: null, pointer: 'mouse', paper: false, hiddenRuns: new Set() };
const X_UNITS = { tokens: 'tokens', steps: 'steps', seconds: 'time' };
const X_TITLES = { tokens: 'tokens', steps: 'optimizer steps', seconds: 'training time' };
const charts = [];
let extents = {};
let waiting = false;

function redraw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; charts.forEach((chart) => chart.draw()); });
}

function moveCursor(value) {
  view.cursor = value;
  charts.forEach((chart) => chart.drawCursor());
}

function zoomTo(domain) {
  const [low, high] = fullDomain();
  if (domain) {
    domain = [Math.max(low, Math.min(...domain)), Math.min(high, Math.max(...domain))];
    if (!(domain[1] - domain[0] > (high - low) * 1e-6)) return;
    if (domain[0] <= low && domain[1] >= high) domain = null;
  }
  view.domain = domain;
  document.body.classList.toggle('zoomed', Boolean(domain));
  redraw();
}

function fullDomain() {
  const [low, high] = extents[view.x];
  return view.logX ? [Math.max(low, high * 1e-5, Number.MIN_VALUE), high] : [0, high || 1];
}
