// Linear and logarithmic scales, and their ticks.

function makeScale([low, high], [from, to], logarithmic) {
  const transform = logarithmic ? (value) => Math.log(Math.max(value, Number.MIN_VALUE)) : (value) => value;
  const invert = logarithmic ? Math.exp : (value) => value;
  const first = transform(low), span = transform(high) - first || 1;
  const scale = (value) => from + ((transform(value) - first) / span) * (to - from);
  scale.back = (pixel) => invert(first + ((pixel - from) / (to - from)) * span);
  return scale;
}

function linearTicks(low, high, maxTicks) {
  const rough = (high - low) / Math.max(1, maxTicks);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((step) => step >= rough * 0.999);
  const ticks = [];
  for (let number = Math.ceil(low / step - 1e-9); number * step <= high + step * 1e-9; number++) {
    ticks.push(number * step || 0); // never -0
  }
  return ticks.length > 1 || maxTicks > 8 ? ticks : linearTicks(low, high, maxTicks + 1);
}

// The densest of these that is not too dense: (factors, powers of 10 from one tick to the next).
const LOG_TICKS = [[[1, 2, 5], 1], [[1, 3], 1], ...[1, 2, 3, 5, 10, 20, 50, 100].map((stride) => [[1], stride])];

function logTicks(low, high, maxTicks) {
  if (high / low < 10) return linearTicks(low, high, maxTicks).filter((tick) => tick > 0);
  const last = Math.log10(high * 1.001);
  for (const [factors, stride] of LOG_TICKS) {
    const ticks = [];
    for (let power = Math.floor(Math.log10(low) / stride) * stride; power <= last; power += stride) {
      ticks.push(...factors.map((factor) => factor * 10 ** power).filter((tick) => tick >= low * 0.999 && tick <= high * 1.001));
    }
    if (ticks.length <= Math.max(3, maxTicks)) return ticks;
  }
}

// Ticks at round numbers: multiples of KiB, MiB ... for bytes, and of minutes, hours ... for time.
function niceTicks(low, high, maxTicks, unit, logarithmic) {
  if (logarithmic) return logTicks(low, high, maxTicks);
  const bases = { bytes: [2 ** 40, 2 ** 30, 2 ** 20, 2 ** 10, 1], time: [86400, 3600, 60, 1] }[unit];
  const base = bases ? bases.find((base) => high - low >= base) || 1 : 1;
  return linearTicks(low / base, high / base, maxTicks).map((tick) => tick * base);
}

// The index of the first value >= `target` in an ascending array.
function firstFrom(values, target) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < target) low = middle + 1;
    else high = middle;
  }
  return low;
}

function nearest(values, target) {
  const after = firstFrom(values, target);
  if (after === 0) return 0;
  if (after === values.length) return after - 1;
  return target - values[after - 1] < values[after] - target ? after - 1 : after;
}

// The centred running mean; the window is shorter near both ends. Values above `highest` are
// ignored, because a single outlier would distort the curve around it.
function smoothed(values, share, highest) {
  const reach = Math.round(values.length * share);
  if (!reach) return values;
  const sums = new Float64Array(values.length + 1), counts = new Int32Array(values.length + 1);
  values.forEach((value, index) => {
    const counted = value !== null && value <= highest;
    sums[index + 1] = sums[index] + (counted ? value : 0);
    counts[index + 1] = counts[index] + (counted ? 1 : 0);
  });
  return values.map((value, index) => {
    const width = Math.min(index, values.length - 1 - index, reach);
    const from = index - width, to = index + width + 1, count = counts[to] - counts[from];
    return value === null || !count ? null : (sums[to] - sums[from]) / count;
  });
}
