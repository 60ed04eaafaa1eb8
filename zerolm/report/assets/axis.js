// Scales and their ticks, linear and logarithmic. Pure.

function makeScale([low, high], [from, to], logarithmic) {
  const bend = logarithmic ? (value) => Math.log(Math.max(value, Number.MIN_VALUE)) : (value) => value;
  const straighten = logarithmic ? Math.exp : (value) => value;
  const first = bend(low), span = bend(high) - first || 1;
  const scale = (value) => from + ((bend(value) - first) / span) * (to - from);
  scale.back = (pixel) => straighten(first + ((pixel - from) / (to - from)) * span);
  return scale;
}

function linearTicks(low, high, most) {
  const rough = (high - low) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((step) => step >= rough * 0.999);
  const ticks = [];
  for (let number = Math.ceil(low / step - 1e-9); number * step <= high + step * 1e-9; number++) {
    ticks.push(number * step || 0); // never -0
  }
  return ticks;
}

function logTicks(low, high, most) {
  const decades = Math.log10(high / low);
  if (decades < 1) return linearTicks(low, high, most).filter((tick) => tick > 0);
  const factors = decades < most / 3 ? [1, 2, 5] : [1];
  const stride = Math.max(1, Math.ceil(decades / most));
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += stride) {
    for (const factor of factors) {
      const tick = factor * 10 ** power;
      if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
    }
  }
  return ticks;
}

// A factor of 1,024 makes round numbers of bytes; of seconds, minutes and hours do.
function niceTicks(low, high, most, unit, logarithmic) {
  if (logarithmic) return logTicks(low, high, most);
  const bases = { bytes: [2 ** 40, 2 ** 30, 2 ** 20, 2 ** 10, 1], time: [86400, 3600, 60, 1] }[unit];
  const base = bases ? bases.find((base) => high - low >= base) || 1 : 1;
  return linearTicks(low / base, high / base, most).map((tick) => tick * base);
}

// The index of the first value that is not below `wanted`, in an ascending array.
function firstFrom(values, wanted) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle + 1;
    else high = middle;
  }
  return low;
}

function nearest(values, wanted) {
  const after = firstFrom(values, wanted);
  if (after === 0) return 0;
  if (after === values.length) return after - 1;
  return wanted - values[after - 1] < values[after] - wanted ? after - 1 : after;
}

// The centred running mean; its window shrinks towards both ends, and what is above `most` has no
// part in it: one value far off would bend the curve around it.
function smoothed(values, share, most) {
  const reach = Math.round(values.length * share);
  if (!reach) return values;
  const sums = new Float64Array(values.length + 1), counts = new Int32Array(values.length + 1);
  values.forEach((value, index) => {
    const there = value !== null && value <= most;
    sums[index + 1] = sums[index] + (there ? value : 0);
    counts[index + 1] = counts[index] + (there ? 1 : 0);
  });
  return values.map((value, index) => {
    const width = Math.min(index, values.length - 1 - index, reach);
    const from = index - width, to = index + width + 1, count = counts[to] - counts[from];
    return value === null || !count ? null : (sums[to] - sums[from]) / count;
  });
}
