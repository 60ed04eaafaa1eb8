// Numbers, durations and units as text.

function significant(value, digits) {
  if (value === 0) return '0';
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e6) {
    const text = value.toExponential(digits - 1);
    return text.replace(/\.?0+e/, 'e').replace('e+', 'e');
  }
  const decimals = Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
  const text = value.toFixed(Math.min(decimals, 12));
  return text.includes('.') ? text.replace(/\.?0+$/, '') : text;
}

function scaled(value, units, digits) {
  const size = Number(Math.abs(value).toPrecision(digits)); // 999,999.9 is 1M
  const [factor, name] = units.find(([factor]) => size >= factor) || [1, ''];
  return significant(value / (factor || 1), digits) + name;
}

const COUNTS = [[1e12, 'T'], [1e9, 'B'], [1e6, 'M'], [1e3, 'k']];
const BYTES = [[2 ** 40, ' TiB'], [2 ** 30, ' GiB'], [2 ** 20, ' MiB'], [2 ** 10, ' KiB'], [0, ' B']];

function duration(seconds) {
  if (seconds < 59.95) return `${significant(seconds, 3)} s`;
  const whole = Math.round(seconds), minutes = Math.round(seconds / 60), hours = Math.floor(minutes / 60);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (hours < 24) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

function format(value, unit, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return 'not finite';
  if (unit === 'bytes') return scaled(value, BYTES, digits);
  if (unit === 'tokens' || unit === 'tokens/s') return scaled(value, COUNTS, digits);
  if (unit === 'share') return `${significant(value * 100, digits)}%`;
  if (unit === 'steps') return Math.abs(value) < 1e6 ? value.toLocaleString('en') : scaled(value, COUNTS, digits);
  if (unit === 'time') return duration(value);
  return significant(value, digits) + (unit === 's' ? ' s' : '');
}
