/* The document is changed only where a value has changed, and names are only ever text. */
const by = (id) => document.getElementById(id);
const SVG = by("roofline").namespaceURI;
function text(element, value) {
  if (element.textContent !== value) element.textContent = value;
}
function attributes(element, values) {
  for (const name in values) {
    const value = String(values[name]);
    if (element.getAttribute(name) !== value) element.setAttribute(name, value);
  }
}
/* Makes the children of `parent` those of `items`: kept by their key, in the order of the items. */
function keyed(parent, items, key, make, update) {
  const old = new Map();
  for (const child of parent.children) old.set(child.dataset.key, child);
  let place = parent.firstElementChild;
  const met = new Map();
  items.forEach((item) => {
    let name = String(key(item));
    const times = met.get(name) || 0; /* shortened names may be alike */
    met.set(name, times + 1);
    if (times) name += " " + times;
    let child = old.get(name);
    old.delete(name);
    if (!child) {
      child = make(item);
      child.dataset.key = name;
    }
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
    update(child, item);
  });
  for (const child of old.values()) child.remove();
}
const html = (tag) => () => document.createElement(tag);
const svg = (tag) => () => document.createElementNS(SVG, tag);
/* A table: `columns` are [heading, explanation, function of the item giving the cell's text]. */
function heading(row, columns) {
  keyed(row, columns, (column) => column[0], html("th"), (cell, column) => {
    text(cell, column[0]);
    cell.title = column[1];
  });
}
function cells(row, columns, item) {
  while (row.children.length < columns.length) row.append(document.createElement("td"));
  columns.forEach((column, index) => {
    const cell = row.children[index], value = column[2](item, cell);
    if (value !== undefined) text(cell, value);
  });
}
/* A line in front of the first text of a cell: a swatch, or behind it a bar. Returns the element. */
function part(cell, tag, className, last) {
  let found = cell.querySelector("." + className);
  if (!found) {
    found = document.createElement(tag);
    found.classList.add(className);
    const label = document.createElement("span");
    label.classList.add("label");
    cell.replaceChildren(...(last ? [label, found] : [found, label]));
  }
  return found;
}
