// HTML elements, and mouse, touch and key events of a chart.

function h(name, attributes, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(key, '');
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(key, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== ''));
  return element;
}

function toggle(label, title, pressed, change) {
  const button = h('button', { type: 'button', class: 'chip', title, 'aria-pressed': String(pressed) }, label);
  button.addEventListener('click', () => {
    const on = button.getAttribute('aria-pressed') !== 'true';
    button.setAttribute('aria-pressed', String(on));
    change(on);
  });
  return button;
}

function action(label, title, act) {
  const button = h('button', { type: 'button', class: 'chip', title }, label);
  button.addEventListener('click', act);
  return button;
}

function save(name, text) {
  const link = h('a', { download: name, href: URL.createObjectURL(new Blob([text], { type: 'text/csv' })) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function listen(chart) {
  const svg = chart.svg, fingers = new Map();
  let pinch = null;
  const place = (event) => {
    const bounds = svg.getBoundingClientRect();
    const at = ((event.clientX - bounds.left) / bounds.width) * (chart.box.right + MARGIN.right);
    return Math.max(chart.box.left, Math.min(chart.box.right, at));
  };
  const activate = () => charts.forEach((other) => { other.active = other === chart; });
  svg.addEventListener('pointermove', (event) => {
    if (fingers.has(event.pointerId)) fingers.set(event.pointerId, place(event));
    if (pinch && fingers.size === 2) {
      const [left, right] = [...fingers.values()].sort((a, b) => a - b);
      const stretch = Math.max(0.05, (pinch.places[1] - pinch.places[0]) / Math.max(8, right - left));
      const wide = (pinch.domain[1] - pinch.domain[0]) * stretch;
      const middle = pinch.middle - ((left + right) / 2 - (chart.box.left + chart.box.right) / 2) * wide / (chart.box.right - chart.box.left);
      zoomTo([middle - wide / 2, middle + wide / 2]);
      return;
    }
    activate();
    moveCursor(chart.x.back(place(event)));
  });
  svg.addEventListener('pointerdown', (event) => {
    view.pointer = event.pointerType in NEAR_PIXELS ? event.pointerType : 'mouse';
    if (event.pointerType === 'mouse') {
      if (event.button !== 0) return;
      chart.dragFrom = place(event);
      svg.setPointerCapture(event.pointerId);
    } else {
      fingers.set(event.pointerId, place(event));
      if (fingers.size === 2) {
        const places = [...fingers.values()].sort((a, b) => a - b);
        const domain = view.domain || fullDomain();
        pinch = { places, domain, middle: chart.x.back((places[0] + places[1]) / 2) + ((chart.box.left + chart.box.right) / 2 - (places[0] + places[1]) / 2) * (domain[1] - domain[0]) / (chart.box.right - chart.box.left) };
      }
    }
    activate();
    moveCursor(chart.x.back(place(event)));
  });
  const release = (event) => {
    fingers.delete(event.pointerId);
    if (fingers.size < 2) pinch = null;
    const from = chart.dragFrom;
    delete chart.dragFrom;
    if (from !== undefined && event.type === 'pointerup' && Math.abs(place(event) - from) > 6) zoomTo([chart.x.back(from), chart.x.back(place(event))]);
  };
  svg.addEventListener('pointerup', release);
  svg.addEventListener('pointercancel', release);
  svg.addEventListener('pointerleave', (event) => {
    if (event.pointerType === 'mouse' && chart.dragFrom === undefined) { chart.active = false; moveCursor(null); }
  });
  svg.addEventListener('dblclick', () => zoomTo(null));
  svg.addEventListener('keydown', (event) => {
    const [low, high] = view.domain || fullDomain();
    const at = view.cursor === null ? (low + high) / 2 : view.cursor;
    const act = {
      ArrowLeft: () => moveCursor(Math.max(low, at - (high - low) / 100)),
      ArrowRight: () => moveCursor(Math.min(high, at + (high - low) / 100)),
      '+': () => zoomTo([at - (high - low) / 4, at + (high - low) / 4]),
      '-': () => zoomTo([low - (high - low) / 2, high + (high - low) / 2]),
      Escape: () => { moveCursor(null); zoomTo(null); },
    }[event.key];
    if (!act) return;
    event.preventDefault();
    activate();
    act();
  });
  svg.addEventListener('blur', () => { if (chart.active) { chart.active = false; moveCursor(null); } });
}
