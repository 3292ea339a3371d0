"use strict";
/* Numbers as people read them; the same rules as watch/units.py, which a test compares. */
function digits(value) {
  if (value >= 99.95) return value.toFixed(0);
  const text = value >= 9.995 ? value.toFixed(1) : value.toFixed(2);
  return text.replace(/\.?0+$/, "");
}
function scaled(value, units, last) {
  for (const [unit, scale] of units) if (value >= scale * 0.9995) return digits(value / scale) + " " + unit;
  return last(value);
}
const units = {
  seconds: (value) => value == null ? "–"
    : scaled(value, [["s", 1], ["ms", 1e-3]], (small) => digits(small / 1e-6) + " µs"),
  amount: (value) => scaled(value, [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]],
    (small) => small.toFixed(0) + " B"),
  big: (value) => value == null ? "–"
    : scaled(value, [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]], digits),
  rate: (value) => {
    const text = units.big(value);
    return value == null ? text : text + (text.includes(" ") ? "B/s" : " B/s");
  },
  share: (value) => {
    if (value == null) return "–";
    const percent = 100 * value;
    return (percent >= 9.95 || percent === 0 ? percent.toFixed(0) : percent.toFixed(1)) + " %";
  },
  flops: (value) => {
    const text = units.big(value);
    return text + (text.includes(" ") ? "FLOP/s" : " FLOP/s");
  },
  age: (seconds) => {
    const days = Math.floor(seconds / 86400), hours = Math.floor(seconds / 3600), minutes = Math.floor(seconds / 60);
    if (days) return days + " d " + hours % 24 + " h";
    if (hours) return hours + " h " + minutes % 60 + " min";
    return minutes ? minutes + " min" : Math.floor(seconds) + " s";
  },
};
