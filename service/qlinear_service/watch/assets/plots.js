/* Trends, and the roofline: all SVG, drawn from the document alone. */
function path(values, most, width, height) {
  const step = width / Math.max(values.length - 1, 1);
  let drawn = "", pen = "M";
  values.forEach((value, index) => {
    if (value == null) { pen = "M"; return; }
    drawn += pen + (index * step).toFixed(1) + " " + (height - value / most * height).toFixed(1);
    pen = "L";
  });
  return drawn;
}
/* `lines`: [values, class of the line, filled below]. The most recent value is at the right. */
function trend(element, points, lines, most) {
  const width = 300, height = 60, shapes = [];
  for (const [values, name, filled] of lines) {
    const padded = Array(Math.max(points - values.length, 0)).fill(null).concat(values);
    const first = padded.findIndex((value) => value != null);
    const line = path(padded, most, width, height - 3);
    if (filled && first >= 0) {
      const start = (first * width / (padded.length - 1)).toFixed(1);
      shapes.push(["area " + name, line + "L" + width + " " + height + "L" + start + " " + height + "Z"]);
    }
    shapes.push(["wave " + name, line]);
  }
  attributes(element, { viewBox: "0 0 " + width + " " + height, preserveAspectRatio: "none" });
  keyed(element, shapes, (shape) => shape[0], svg("path"), (shape, [name, d]) => attributes(shape, { class: name, d }));
}
const plot = { left: 58, right: 548, top: 12, bottom: 290 };
function axis(low, high, from, to) {
  const a = Math.log10(low), b = Math.log10(high);
  const at = (value) => from + (Math.log10(value) - a) / (b - a) * (to - from);
  const ticks = [];
  for (let power = Math.ceil(a - 1e-9); power <= b + 1e-9; power++) ticks.push(10 ** power);
  return { at, ticks, low, high };
}
function plotted(shapes) {
  const points = [];
  shapes.forEach((shape) => shape.rows.forEach((rows) => points.push({
    key: shape.shape + " " + rows.m, colour: "s" + shape.colour, m: rows.m, busy: rows.busy_ratio,
    x: 2 * rows.products_per_byte, y: 2 * rows.products_per_second,
    title: shape.shape + ", up to " + rows.m + " rows: " + units.flops(2 * rows.products_per_second) + ", "
      + units.rate(rows.bytes_per_second) + ", " + units.share(rows.roofline_ratio) + " of the shortest time",
  })));
  return points;
}
function roofline(machine, shapes) {
  const points = plotted(shapes), read = machine.peak_bytes_per_second, top = 2 * machine.peak_products_per_second;
  const ridge = read ? top / read : 10;
  const xs = points.map((point) => point.x).concat(ridge / 30, ridge * 6);
  const x = axis(Math.min(...xs) / 1.6, Math.max(...xs) * 1.6, plot.left, plot.right);
  const ys = points.map((point) => point.y).concat(read ? [read * ridge / 30, top] : [1e9, 1e11]);
  const y = axis(Math.min(...ys) / 2, Math.max(...ys) * 2, plot.bottom, plot.top);
  const drawn = grid(x, y);
  if (read) drawn.push(...roofs(x, y, machine, top));
  points.sort((a, b) => b.busy - a.busy);
  for (const point of points) drawn.push(["circle", point.key, {
    class: "point " + point.colour, cx: x.at(point.x).toFixed(1), cy: y.at(point.y).toFixed(1),
    r: (4.5 + 9 * Math.sqrt(Math.min(point.busy, 1))).toFixed(1),
  }, "", point.title]);
  const taken = [];
  for (const point of points) { /* the busiest are named; names do not lie upon each other */
    const left = x.at(point.x), high = y.at(point.y) - 9 - 9 * Math.sqrt(Math.min(point.busy, 1));
    const covers = (other) => Math.abs(x.at(other.x) - left) < 24 && Math.abs(y.at(other.y) - high + 3) < 11;
    if (taken.length > 7 || points.some(covers)) continue;
    if (taken.some(([a, b]) => Math.abs(a - left) < 36 && Math.abs(b - high) < 13)) continue;
    taken.push([left, high]);
    drawn.push(["text", "label " + point.key, {
      class: "named", "text-anchor": "middle", x: left.toFixed(1), y: high.toFixed(1),
    }, point.m === "inf" ? "more rows" : "≤ " + point.m]);
  }
  keyed(by("roofline"), drawn, (one) => one[0] + one[1], (one) => svg(one[0])(), (element, one) => {
    attributes(element, one[2]);
    if (one[4]) {
      if (!element.firstChild) element.append(svg("title")());
      text(element.firstChild, one[4]);
    } else text(element, one[3] || "");
  });
}
function grid(x, y) {
  const drawn = [];
  for (const tick of x.ticks) {
    const at = x.at(tick).toFixed(1);
    drawn.push(["line", "x" + tick, { class: "grid", x1: at, x2: at, y1: plot.top, y2: plot.bottom }]);
    drawn.push(["text", "x" + tick, { x: at, y: plot.bottom + 15, "text-anchor": "middle" }, units.big(tick)]);
  }
  for (const tick of y.ticks) {
    const at = y.at(tick).toFixed(1);
    drawn.push(["line", "y" + tick, { class: "grid", y1: at, y2: at, x1: plot.left, x2: plot.right }]);
    drawn.push(["text", "y" + tick, { x: plot.left - 6, y: Number(at) + 4, "text-anchor": "end" }, units.big(tick)]);
  }
  drawn.push(["text", "x", { x: plot.right, y: plot.bottom + 32, "text-anchor": "end" }, "operations per byte"]);
  drawn.push(["text", "y", { x: plot.left + 6, y: plot.top + 8 }, "FLOP/s"]);
  return drawn;
}
function roofs(x, y, machine, top) {
  const drawn = [], read = machine.peak_bytes_per_second, large = machine.large_bytes_per_second;
  const slanted = (rate) => {
    const start = Math.max(x.low, y.low / rate), bend = Math.min(top / rate, x.high);
    return "M" + x.at(start) + " " + y.at(start * rate) + "L" + x.at(bend) + " " + y.at(bend * rate);
  };
  const name = (key, at, height, label) => drawn.push(["text", key, { class: "named", x: at, y: height, "text-anchor": "end" }, label]);
  if (large < read * 0.9) {
    drawn.push(["path", "large", { class: "roof second", d: slanted(large) }]);
  }
  drawn.push(["path", "roof", { class: "roof", d: slanted(read) + "L" + plot.right + " " + y.at(top) }]);
  name("top", plot.right, y.at(top) - 7, "multiplying " + units.flops(top));
  const middle = Math.sqrt(Math.max(x.low, y.low / read) * top / read);
  name("read", x.at(middle) - 8, y.at(middle * read) - 4, "reading " + units.rate(read));
  if (large < read * 0.9) drawn.push(["text", "large", { x: x.at(middle) + 10, y: y.at(middle * large) + 16 },
    "from memory " + units.rate(large)]);
  return drawn;
}
