// One panel: curves over the x-axis that all panels share, events, a cursor, and a legend.

const MARGIN = { left: 44, right: 12, top: 20, bottom: 42 };
const CHARACTER_PIXELS = 6.9;
const NEAR_PIXELS = { mouse: 7, pen: 9, touch: 18 };

class Chart {
  // `series`: {label, name, run, colour, dash, faint, marks, x: {tokens, steps, seconds}, y}
  constructor(panel, series, events, clipping) {
    Object.assign(this, { panel, series, events, clipping, log: false, hidden: new Set(), all: false });
    const template = document.getElementById('chart');
    this.figure = template.content.firstElementChild.cloneNode(true);
    this.svg = this.figure.querySelector('svg');
    this.tip = this.figure.querySelector('.tip');
    this.figure.querySelector('.title').textContent = panel.title;
    this.figure.querySelector('.unit').textContent = panel.unit === 'share' ? '' : panel.unit;
    this.figure.querySelector('.about').textContent = panel.about;
    this.log = panel.log && this.positive();
    const buttons = this.figure.querySelector('.buttons');
    if (this.positive()) buttons.append(toggle('log', 'Logarithmic scale', this.log, (on) => { this.log = on; this.draw(); }));
    this.allButton = toggle('full range', 'Show outliers too', false, (on) => { this.all = on; this.draw(); });
    buttons.append(this.allButton, action('CSV', 'Save the values that this chart has', () => save(`${panel.title}.csv`, this.csv())));
    this.legend();
    listen(this);
    charts.push(this);
  }

  // One line for each point, of all curves; a long curve has been thinned.
  csv() {
    const cell = (value) => (/[",\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value ?? '');
    const rows = this.series.flatMap((one) => one.y.map((value, index) => [
      one.full, one.faint ? 'yes' : 'no', one.x.steps[index], one.x.tokens[index], one.x.seconds[index], value]));
    return [['curve', 'rolled back', 'step', 'tokens', 'seconds', `${this.panel.title}, ${this.panel.unit}`], ...rows].map((row) => row.map(cell).join(',') + '\n').join('');
  }

  positive() {
    return this.series.every((one) => one.y.every((value) => value === null || value > 0));
  }

  element(name, attributes, parent = this.svg) {
    const element = document.createElementNS(this.svg.namespaceURI, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    parent.append(element);
    return element;
  }

  visible() {
    return this.series.filter((one) => !this.hidden.has(one.label) && !view.hiddenRuns.has(one.run));
  }

  legend() {
    const host = this.figure.querySelector('.legend');
    const labels = new Map();
    for (const one of this.series) if (!one.faint && !labels.has(one.label)) labels.set(one.label, one);
    if (labels.size < 2) return;
    for (const [label, one] of labels) {
      const chip = toggle(label, `Show or hide ${label}`, true, (on) => {
        if (on) this.hidden.delete(label);
        else this.hidden.add(label);
        this.draw();
      });
      chip.prepend(this.legendKey(one));
      host.append(chip);
    }
  }

  // A short piece of the curve, with its dashes and its mark.
  legendKey(one) {
    const key = this.element('svg', { class: 'sample', viewBox: '0 0 26 10', width: 26, height: 10 }, document.createElement('i'));
    key.style.stroke = one.legendColour || one.colour;
    const line = this.element('path', { d: 'M0 5H26', fill: 'none', 'stroke-width': 1.7 }, key);
    if (one.dash) line.setAttribute('stroke-dasharray', one.dash);
    if (one.marks) this.mark(one, 13, 5, key);
    return key;
  }

  mark(one, x, y, layer) {
    const paths = ['M-3.5 0A3.5 3.5 0 1 0 3.5 0A3.5 3.5 0 1 0 -3.5 0Z', 'M-3.2 -3.2H3.2V3.2H-3.2Z', 'M0 -4.6L4.6 0L0 4.6L-4.6 0Z', 'M0 -4.4L4.2 3.2H-4.2Z', 'M0 4.4L4.2 -3.2H-4.2Z'];
    return this.element('path', { class: 'mark', d: paths[one.shape % paths.length], transform: `translate(${x} ${y})` }, layer);
  }

  // [low, high, clipped]: the range of the values in view, without a few outliers unless "full range" is on.
  range(shown) {
    const values = [];
    for (const { one, from, to } of shown) {
      for (let index = from; index < to; index++) {
        const value = one.y[index];
        if (value !== null && !(one.faint && !this.all)) values.push(value);
      }
    }
    this.constant = null;
    if (!values.length) return [0, 1, false];
    values.sort((a, b) => a - b);
    let low = values[0], high = values[values.length - 1], cut = false;
    const transform = this.log ? Math.log : (value) => value;
    const upper = values[Math.floor((values.length - 1) * 0.95)], lower = values[Math.floor((values.length - 1) * 0.02)];
    const span = transform(upper) - transform(lower);
    if (!this.panel.points && values.length >= 20 && span > 0 && transform(high) - transform(upper) > 1.5 * span) {
      cut = true;
      const edge = values.filter((value) => transform(value) - transform(upper) <= 1.5 * span).pop();
      if (!this.all) high = edge;
    }
    if (this.clipping && values.length) {
      low = Math.min(low, this.clipping);
      high = Math.max(high, this.clipping);
    }
    this.constant = high - low <= 1e-9 * Math.abs(high) ? high : null; // but for rounding
    if (this.constant !== null) { low = high - (Math.abs(high) * 0.05 || 0.5); high += Math.abs(high) * 0.05 || 0.5; }
    if (this.log) {
      const margin = (high / low) ** 0.04;
      return [Math.max(low / margin, Number.MIN_VALUE), high * margin, cut];
    }
    const margin = (high - low) * 0.05;
    const zero = low >= 0 && low < (high - low) * (/^(nats|bits) per /.test(this.panel.unit) ? 0 : 0.3);
    return [zero ? 0 : low - margin, high + margin, cut];
  }

  draw() {
    const width = view.paper ? (this.panel.wide ? 680 : 330) : Math.max(240, this.figure.querySelector('.plot').clientWidth);
    const height = this.panel.wide ? (width < 560 ? 286 : 376) : 236;
    this.svg.setAttribute('viewBox', `0 0 ${width} ${height}`);
    this.svg.replaceChildren();
    const box = this.box = { left: MARGIN.left, right: width - MARGIN.right, top: MARGIN.top, bottom: height - MARGIN.bottom };
    const domain = view.domain || fullDomain();
    const shown = this.visible().map((one) => {
      const places = one.x[view.x];
      return { one, places, from: Math.max(0, firstFrom(places, domain[0])), to: firstFrom(places, domain[1] * (1 + 1e-9)) };
    });
    const [low, high, cut] = this.range(shown);
    this.allButton.hidden = !cut;
    const y = this.y = makeScale([low, high], [box.bottom, box.top], this.log);
    const ticks = this.constant !== null ? [this.constant] : niceTicks(low, high, Math.max(3, Math.floor((box.bottom - box.top) / 42)), this.panel.unit, this.log);
    const labels = ticks.map((tick) => format(tick, this.panel.unit, 4));
    box.left = Math.max(MARGIN.left, 12 + CHARACTER_PIXELS * Math.max(0, ...labels.map((label) => label.length)));
    this.x = makeScale(domain, [box.left, box.right], view.logX);
    this.grid(domain, ticks, labels);
    const id = `clip${charts.indexOf(this)}`;
    const clip = this.element('clipPath', { id }, this.element('defs', {}));
    this.element('rect', { x: box.left - 5, y: box.top - 4, width: box.right - box.left + 10, height: box.bottom - box.top + 8 }, clip);
    this.drawEvents();
    const layer = this.element('g', { 'clip-path': `url(#${id})` });
    if (this.clipping) {
      this.element('line', { class: 'clipping', x1: box.left, x2: box.right, y1: y(this.clipping), y2: y(this.clipping) }, layer);
    }
    for (const part of shown) this.curve(layer, part, high);
    this.cursorLayer = this.element('g', { class: 'cursor' });
    this.describe(shown);
    this.drawCursor();
  }

  curve(layer, { one, places, from, to }, high) {
    const first = Math.max(0, from - 1), last = Math.min(places.length, to + 1);
    // Where curves coincide, wider lines of earlier curves show at both sides of the last one.
    const colour = (element, seam = 0) => {
      element.style.stroke = one.colour;
      if (seam) element.style.strokeWidth = seam;
      return element;
    };
    if (one.marks) {
      if (last - first > 1) {
        const line = colour(this.element('path', { class: 'curve thin', d: this.path(places, one.y, first, last) }, layer));
        if (one.dash) line.setAttribute('stroke-dasharray', one.dash);
      }
      if (last - first < 400) {
        for (let index = first; index < last; index++) {
          if (one.y[index] !== null) colour(this.mark(one, this.x(places[index]), this.y(one.y[index]), layer));
        }
      }
      return;
    }
    const smooth = this.panel.smooth && view.smoothing > 0 && one.y.length > 20 && !one.faint;
    const raw = colour(this.element('path', { class: `curve ${one.faint ? 'faint' : smooth ? 'raw' : ''}`, d: this.path(places, one.y, first, last) }, layer), smooth || one.faint ? 0 : one.width);
    if (one.dash) raw.setAttribute('stroke-dasharray', one.dash);
    if (smooth) {
      const made = `${view.smoothing} ${high}`;
      if (one.made !== made) Object.assign(one, { made, smooth: smoothed(one.y, view.smoothing, high) });
      const line = colour(this.element('path', { class: 'curve', d: this.path(places, one.smooth, first, last) }, layer), one.width);
      if (one.dash) line.setAttribute('stroke-dasharray', one.dash);
    }
    for (let index = from, drawn = 0; index < to && drawn < 60; index++) {
      if (one.y[index] !== null && one.y[index] > high) {
        const at = this.x(places[index]), top = this.box.top;
        const mark = this.element('path', { class: 'beyond', d: `M${at - 4} ${top + 5}L${at} ${top - 2}L${at + 4} ${top + 5}Z` }, layer);
        mark.style.fill = one.colour;
        mark.style.opacity = one.faint ? 0.55 : 1;
        drawn++;
      }
    }
  }

  // The SVG path of a curve. In each column of pixels only the first, lowest, highest and last point are drawn.
  path(places, values, first, last) {
    const parts = [];
    const every = last - first <= 4 * (this.box.right - this.box.left);
    let pen = 'M', column = null, kept = null;
    const flush = () => {
      if (kept) for (const at of [...new Set([kept.first, ...(kept.low.index < kept.high.index ? [kept.low.index, kept.high.index] : [kept.high.index, kept.low.index]), kept.last])]) point(at);
      kept = null;
    };
    const point = (index) => {
      parts.push(pen, this.x(places[index]).toFixed(1), ' ', this.y(values[index]).toFixed(1));
      pen = 'L';
    };
    for (let index = first; index < last; index++) {
      if (values[index] === null || (this.log && values[index] <= 0)) { flush(); pen = 'M'; continue; }
      if (every) { point(index); continue; }
      const here = Math.round(this.x(places[index]));
      if (!kept || here !== column) {
        flush();
        column = here;
        kept = { first: index, last: index, low: { index }, high: { index } };
      }
      kept.last = index;
      if (values[index] < values[kept.low.index]) kept.low.index = index;
      if (values[index] > values[kept.high.index]) kept.high.index = index;
    }
    flush();
    return parts.join('') || 'M0 0';
  }

  grid(domain, ticks, labels) {
    const box = this.box;
    const maxTicks = Math.max(2, Math.floor((box.right - box.left) / 90));
    for (const tick of niceTicks(...domain, maxTicks, X_UNITS[view.x], view.logX)) {
      const at = this.x(tick);
      if (at < box.left - 1 || at > box.right + 1) continue;
      this.element('line', { class: 'grid', x1: at, x2: at, y1: box.top, y2: box.bottom });
      const anchor = at > box.right - 18 ? 'end' : 'middle';
      this.element('text', { x: Math.min(at, box.right), y: box.bottom + 17, 'text-anchor': anchor }).textContent = format(tick, X_UNITS[view.x], 3);
    }
    this.element('text', { x: (box.left + box.right) / 2, y: box.bottom + 35, 'text-anchor': 'middle' }).textContent = X_TITLES[view.x];
    ticks.forEach((tick, index) => {
      const at = this.y(tick);
      this.element('line', { class: 'grid', x1: box.left, x2: box.right, y1: at, y2: at });
      this.element('text', { x: box.left - 7, y: at + 4, 'text-anchor': 'end' }).textContent = labels[index];
    });
  }

  drawEvents() {
    if (!view.events) return;
    const box = this.box;
    const marked = new Map();
    for (const event of this.events) {
      if (view.hiddenRuns.has(event.run)) continue;
      const at = this.x(event[view.x]);
      if (at < box.left - 1 || at > box.right + 1) continue;
      if (event.level === 'quiet') {
        this.element('line', { class: 'tick', x1: at, x2: at, y1: box.bottom - 5, y2: box.bottom });
        continue;
      }
      this.element('line', { class: `event ${event.level}`, x1: at, x2: at, y1: box.top, y2: box.bottom });
      const places = marked.get(event.level) || marked.set(event.level, []).get(event.level);
      if (places.some((place) => Math.abs(place - at) < 5)) continue;
      places.push(at);
      const shapes = {
        bad: `M${at - 4} ${box.top - 13}l8 8m0 -8l-8 8`,
        notable: `M${at} ${box.top - 14}l5 9h-10z`,
        plain: `M${at} ${box.top - 13}l4 4l-4 4l-4 -4z`,
      };
      this.element('path', { class: `shape ${event.level}`, d: shapes[event.level] });
    }
  }

  drawCursor() {
    if (!this.cursorLayer) return;
    this.cursorLayer.replaceChildren();
    if (view.cursor === null) { this.tip.hidden = true; return; }
    const at = this.x(view.cursor), box = this.box;
    if (!(at >= box.left - 1 && at <= box.right + 1)) { this.tip.hidden = true; return; }
    this.element('line', { x1: at, x2: at, y1: box.top, y2: box.bottom }, this.cursorLayer);
    if (this.dragFrom !== undefined) {
      this.element('rect', { class: 'selection', x: Math.min(at, this.dragFrom), width: Math.abs(at - this.dragFrom), y: box.top, height: box.bottom - box.top }, this.cursorLayer);
    }
    const rows = this.readings(at);
    for (const row of rows) {
      const dot = this.element('circle', { r: 3.5, cx: row.at, cy: Math.max(box.top, Math.min(box.bottom, this.y(row.value))) }, this.cursorLayer);
      dot.style.fill = row.one.colour;
    }
    if (this.active) this.showTip(at, rows);
    else this.tip.hidden = true;
  }

  // The point of each visible curve that is nearest to `at`, a position in pixels.
  readings(at) {
    const rows = [];
    for (const one of this.visible()) {
      const places = one.x[view.x];
      if (one.faint || !places.length) continue;
      const index = nearest(places, this.x.back(at));
      if (one.y[index] === null) continue;
      const where = this.x(places[index]);
      if (Math.abs(where - at) > 40 && one.marks) continue;
      rows.push({ one, index, at: where, value: one.y[index], step: one.x.steps[index], tokens: one.x.tokens[index], seconds: one.x.seconds[index] });
    }
    return rows;
  }

  showTip(at, rows) {
    const near = rows.reduce((best, row) => (!best || Math.abs(row.at - at) < Math.abs(best.at - at) ? row : best), null);
    const events = view.events ? this.events.filter((event) => Math.abs(this.x(event[view.x]) - at) <= NEAR_PIXELS[view.pointer] && !view.hiddenRuns.has(event.run)) : [];
    this.tip.hidden = !near && !events.length;
    if (this.tip.hidden) return;
    this.tip.replaceChildren();
    if (near) this.tip.append(h('div', { class: 'where' }, `step ${near.step.toLocaleString('en')} · ${format(near.tokens, 'tokens')} tokens · ${duration(near.seconds)}`));
    const maxRows = 14, sorted = rows.length > maxRows ? [...rows].sort((a, b) => b.value - a.value) : rows;
    for (const row of sorted.slice(0, maxRows)) {
      const dot = h('i', { class: 'dot' });
      dot.style.background = row.one.colour;
      this.tip.append(h('div', { class: 'row' }, dot, h('span', {}, row.one.full), h('b', {}, format(row.value, this.panel.unit, 5))));
    }
    if (rows.length > maxRows) this.tip.append(h('div', { class: 'where' }, `and ${rows.length - maxRows} lower ones`));
    for (const event of events.slice(-4)) {
      this.tip.append(h('div', { class: `what ${event.level}` }, h('b', {}, `${event.title} `), `step ${event.step.toLocaleString('en')}: ${event.words}`));
    }
    const width = this.svg.clientWidth, factor = width / (this.box.right + MARGIN.right);
    this.tip.style.left = at * factor > width / 2 ? 'auto' : `${at * factor + 14}px`;
    this.tip.style.right = at * factor > width / 2 ? `${width - at * factor + 14}px` : 'auto';
  }

  describe(shown) {
    const descriptions = shown.filter(({ one }) => !one.faint).slice(0, 8).map(({ one }) => {
      const values = one.y.filter((value) => value !== null);
      if (!values.length) return `${one.full}: no values`;
      return `${one.full}: ${format(values[0], this.panel.unit)} at the start, ${format(values[values.length - 1], this.panel.unit)} at the end`;
    });
    this.svg.setAttribute('aria-label', `${this.panel.title}. ${descriptions.join('. ')}. Arrow keys move a cursor, plus and minus zoom, Escape shows all.`);
  }
}
