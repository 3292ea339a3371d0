/* Asks for the document every two seconds and shows it. */
const FORMAT = @FORMAT@, EVERY = 2000, WAIT = 8000, FEWEST_POINTS = 30;
const M = ["1", "8", "16", "32", "64", "128", "512", "inf"];
const PARTS = { queue: "waiting", copies: "copies", kernel: "computing", reply: "reply", rest: "rest" };
const STATES = { serving: "good", starting: "fair", draining: "fair" };
let now = null, seen = 0, sorted = "";

function answer(id, one) {
  const card = by(id);
  text(card.querySelector(".headline"), one.headline);
  card.querySelector(".headline").className = "headline " + one.level;
  text(card.querySelector(".text"), one.text);
  card.style.setProperty("--level", "var(--" + one.level + ")");
}
function most(id, value) { text(by(id).querySelector(".most"), value); }
function highest(...lists) {
  return lists.flat().reduce((high, value) => value > high ? value : high, 0);
}
function trends(one) {
  const calls = highest(one.calls_per_second), slow = highest(one.p99_seconds);
  const points = Math.max(one.calls_per_second.length, FEWEST_POINTS);
  const failed = highest(one.failed_per_second) ? [[one.failed_per_second, "red", true]] : [];
  trend(by("calls-trend"), points, [[one.calls_per_second, "", true], ...failed], calls || 1);
  most("healthy", "most " + units.big(calls) + "/s in " + units.age(points * one.step_seconds));
  const busy = Math.max(1, highest(one.busy_ratio));
  trend(by("busy-trend"), points, [[one.busy_ratio, "", true]], busy);
  most("machine", "most " + units.share(highest(one.busy_ratio)));
  trend(by("latency-trend"), points, [[one.p99_seconds, "soft"], [one.p50_seconds, ""]], slow || 1);
  most("time", slow ? "p99 at most " + units.seconds(slow) : "");
}
function parts(time) {
  const total = time.parts.reduce((sum, one) => sum + one.seconds, 0) || 1;
  const shown = time.mean_seconds == null ? [] : time.parts;
  keyed(by("parts"), shown, (one) => one.name, html("i"), (bar, one) => {
    bar.className = one.name;
    bar.style.width = 100 * one.seconds / total + "%";
    bar.title = PARTS[one.name] + ": " + units.seconds(one.seconds);
  });
  keyed(by("parts-key"), shown, (one) => one.name, () => {
    const item = document.createElement("li");
    item.append(document.createElement("i"), document.createElement("span"));
    return item;
  }, (item, one) => {
    item.firstChild.className = one.name;
    text(item.lastChild, PARTS[one.name] + " " + units.seconds(one.seconds));
  });
}
function notes(list) {
  keyed(by("notes"), list, (one) => one.headline, () => {
    const item = document.createElement("li");
    item.append(document.createElement("b"), document.createElement("span"));
    return item;
  }, (item, one) => {
    item.className = one.level;
    text(item.firstChild, one.headline);
    text(item.lastChild, one.text);
  });
}
function swatched(cell, shape) {
  const swatch = part(cell, "i", "swatch", false);
  swatch.className = "swatch s" + shape.colour;
  text(cell.querySelector(".label"), shape.shape);
}
const heatColumns = [["shape", "input features, output features, bits, group size", (one, cell) => { swatched(cell, one); }]]
  .concat(M.map((m) => [m === "inf" ? "more" : "≤ " + m, "batches of so many rows", (one, cell) => {
    const rows = one.rows.find((each) => each.m === m), ratio = rows && rows.roofline_ratio;
    cell.className = ratio == null ? "" : "h" + Math.min(4, Math.floor(ratio * 5));
    cell.title = rows ? units.seconds(rows.mean_seconds) + " a batch, " + units.rate(rows.bytes_per_second) + ", "
      + units.big(rows.batches_per_second) + " batches/s" : "";
    return !rows ? "" : ratio == null ? "·" : (100 * ratio).toFixed(0);
  }]));
const shapeColumns = [
  heatColumns[0],
  ["layers", "layers of this shape", (one) => String(one.layers)],
  ["calls/s", "answered calls", (one) => units.big(one.calls_per_second)],
  ["p50", "arrival to reply", (one) => units.seconds(one.p50_seconds)],
  ["p99", "arrival to reply", (one) => units.seconds(one.p99_seconds)],
  ["wait", "mean wait for a batch", (one) => units.seconds(one.queue_seconds)],
  ["kernel", "mean time of a computation", (one) => units.seconds(one.kernel_seconds)],
  ["rows a batch", "mean, of the rows that cost at most a tenth more than one", (one) => one.batch_rows == null ? "–"
    : units.big(one.batch_rows) + (one.sweet_spot_rows == null ? "" : " of " + one.sweet_spot_rows)],
  ["busy", "share of the time", (one) => units.share(one.busy_ratio)],
  ["bandwidth", "effective, while computing; the bar: of the largest that was measured", (one, cell) => {
    const bar = part(cell, "span", "bar", true);
    if (!bar.firstChild) bar.append(document.createElement("i"));
    const peak = now.machine.peak_bytes_per_second;
    bar.firstChild.style.width = Math.min(100, 100 * (one.bytes_per_second || 0) / (peak || Infinity)) + "%";
    text(cell.querySelector(".label"), units.rate(one.bytes_per_second));
  }],
  ["of what it can", "shortest possible time over measured time", (one, cell) => {
    const ratio = one.roofline_ratio;
    cell.className = ratio == null ? "" : ratio >= 0.6 ? "good" : "fair";
    return units.share(ratio);
  }],
];
const layerColumns = [
  ["layer", "full name", (one, cell) => { cell.className = "name"; return one.name; }],
  ["shape", "input features, output features, bits, group size", (one) => one.shape],
  ["memory", "of its tensors; click to sort", (one) => units.amount(one.packed_bytes), "packed_bytes"],
  ["calls/s", "finished calls; click to sort", (one) => units.big(one.calls_per_second), "calls_per_second"],
  ["rows waiting", "in the queue now; click to sort", (one) => String(one.rows_waiting), "rows_waiting"],
];
function shapes(list) {
  const names = list.map((one) => one.shape).sort();
  list.forEach((one) => { one.colour = names.indexOf(one.shape) % 8; });
  keyed(by("heat"), list, (one) => one.shape, html("tr"), (row, one) => cells(row, heatColumns, one));
  keyed(by("shapes"), list, (one) => one.shape, html("tr"), (row, one) => {
    row.className = one.busy_ratio ? "" : "quiet";
    cells(row, shapeColumns, one);
  });
  text(by("shapes-more"), now.shapes_left_out ? "and " + now.shapes_left_out + " more" : "");
}
function layers() {
  const wanted = by("filter").value.toLowerCase();
  const found = now.layers.filter((one) => (one.name + " " + one.shape).toLowerCase().includes(wanted));
  if (sorted) found.sort((a, b) => b[sorted] - a[sorted]);
  keyed(by("layers"), found, (one) => one.name, html("tr"), (row, one) => {
    row.className = one.calls_per_second || one.rows_waiting ? "" : "quiet";
    cells(row, layerColumns, one);
  });
  const more = now.layers_total - now.layers.length;
  text(by("layers-count"), now.layers_total + ", " + units.amount(now.packed_bytes) + (more > 0 ? "; " + more + " not shown" : ""));
}
function gauges(machine) {
  const told = [], all = machine.gauges;
  if (all.clock_hertz) told.push(units.big(all.clock_hertz) + "Hz");
  if (all.power_watts) told.push(all.power_watts.toFixed(0) + " W");
  if (all.temperature_celsius) told.push(all.temperature_celsius.toFixed(0) + " °C");
  return told;
}
function show() {
  text(by("state"), now.state);
  by("state").className = "state " + (STATES[now.state] || "idle");
  text(by("facts"), [now.device + (now.kernels && now.kernels !== now.device ? ", " + now.kernels : ""), ...gauges(now.machine),
    "version " + now.version, "up " + units.age(now.uptime_seconds), now.queue.rows + " rows wait",
    units.amount(now.queue.bytes) + " of " + units.amount(now.queue.limit_bytes) + " in flight"].join(" · "));
  for (const id of ["healthy", "machine", "time"]) answer(id, now.answers[id]);
  notes(now.notes);
  parts(now.time);
  trends(now.trend);
  shapes(now.shapes);
  roofline(now.machine, now.shapes);
  layers();
  document.title = (now.answers.healthy.level === "good" ? "" : "! ") + "qlinear " + now.state;
}
async function ask() {
  try {
    const reply = await fetch("now.json", { cache: "no-store", signal: AbortSignal.timeout(WAIT) });
    const found = await reply.json();
    /* Another server than the page came from, perhaps with another page. */
    if (now && found && found.version && found.version !== now.version) location.reload();
    return found && found.format === FORMAT ? found : null;
  } catch {
    return null;
  }
}
function lost() {
  text(by("state"), "unreachable");
  by("state").className = "state bad";
  if (now) text(by("age"), "last seen " + units.age((performance.now() - seen) / 1000) + " ago");
  document.title = "! qlinear unreachable";
}
async function again() {
  try {
    if (document.hidden) return;
    const answered = await ask();
    by("main").classList.toggle("stale", !answered);
    if (!answered) {
      lost();
      return;
    }
    now = answered;
    seen = performance.now();
    text(by("age"), "");
    show();
  } finally {
    setTimeout(again, EVERY);
  }
}
heading(by("heat-head"), heatColumns);
heading(by("shapes-head"), shapeColumns);
heading(by("layers-head"), layerColumns);
layerColumns.forEach((column, index) => {
  const cell = by("layers-head").children[index];
  if (column[3]) cell.addEventListener("click", () => {
    sorted = sorted === column[3] ? "" : column[3];
    for (const each of by("layers-head").children) each.classList.toggle("sorted", sorted !== "" && each === cell);
    if (now) layers();
  });
  cell.classList.toggle("sorts", Boolean(column[3]));
});
by("filter").addEventListener("input", () => { if (now) layers(); });
again();
