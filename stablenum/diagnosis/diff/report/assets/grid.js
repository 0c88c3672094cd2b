// The list of operations. Only the lines in view are in the document, so that any number of them is fast.

const AROUND = 10;
const tree = document.getElementById("tree");
const detail = document.getElementById("detail");
const body = make("div", { role: "rowgroup", class: "lines" });
const elements = new Map(); // item -> its element
let visible = [];
let rowHeight = 30;
let active = null; // the item that the tab key reaches
let side = "left"; // the side on which the arrow keys move
let selected = null; // the row whose details are shown

function isOpen(node) {
  return filters.searching ? !node.closedByUser : node.open;
}

function setOpen(node, open) {
  Object.assign(node, filters.searching ? { closedByUser: !open } : { open });
}

function flatten() {
  visible = [];
  for (const item of root.items) show(item);
  visible.forEach((item, i) => (item.position = i));
  for (const [item, element] of elements) if (item instanceof Node) fill(item, element);
  if (!active || !isVisible(active)) active = visible[0] ?? null;
  tree.setAttribute("aria-rowcount", visible.length + 1);
  body.style.height = `${visible.length * rowHeight}px`;
  draw();
}

function show(item) {
  if (item instanceof Node) {
    if (!item.lines.some((line) => line.matches)) return;
    visible.push(item);
    if (isOpen(item)) for (const inner of item.items) show(inner);
  } else if (item.matches) visible.push(item);
}

function isVisible(item) {
  return visible[item.position] === item;
}

// Brings the document up to date: elements in view stay where they are, so that the focus is not lost.
function draw() {
  const wanted = inView();
  for (const [item, element] of elements) {
    if (!wanted.has(item)) {
      element.remove();
      elements.delete(item);
    }
  }
  let next = body.firstElementChild;
  for (const item of [...wanted].sort((a, b) => a.position - b.position)) {
    const element = elements.get(item) ?? build(item);
    if (element === next) next = next.nextElementSibling;
    else body.insertBefore(element, next);
    update(item, element);
  }
}

function inView() {
  const from = Math.floor(tree.scrollTop / rowHeight) - AROUND;
  const to = from + Math.ceil(tree.clientHeight / rowHeight) + 2 * AROUND;
  return new Set(visible.slice(Math.max(0, from), to).concat(active && isVisible(active) ? [active] : []));
}

function build(item) {
  const element = item instanceof Node ? buildNode(item) : buildLine(item);
  element.item = item;
  elements.set(item, element);
  return element;
}

function buildNode(node) {
  const element = make(
    "div",
    { role: "row", class: "row module", "aria-level": node.level, style: `--level: ${node.level}` },
    make("div", { role: "gridcell", class: "cell" }),
    make("div", { role: "gridcell", class: "cell" }),
  );
  fill(node, element);
  return element;
}

// Says what is in a module, as far as a filter leaves it.
function fill(node, element) {
  const left = node.rowsOf("left");
  const right = node.rowsOf("right");
  element.setAttribute("aria-expanded", isOpen(node));
  element.children[0].replaceChildren(
    make("span", { class: "arrow", "aria-hidden": "true" }, isOpen(node) ? "▾" : "▸"),
    make("span", { class: "name" }, tidy(node.name)),
    tallies(left),
  );
  element.children[1].replaceChildren(make("span", { class: "name" }, commonModule(right)), tallies(right));
}

function tallies(found) {
  const counts = Object.entries(countsOf(found)).filter(([, number]) => number);
  const items = counts.map(([state, number]) =>
    make("span", { class: `tally ${state}` }, `${GLYPHS[state]} ${counted(number)}`,
      make("span", { class: "unseen" }, ` ${state}, `)));
  return make("span", { class: "tallies" }, ...items);
}

function buildLine(line) {
  const { level } = line.parent;
  return make(
    "div",
    { role: "row", class: `row line ${isLinked(line) ? "linked" : ""}`, "aria-level": level + 1,
      style: `--level: ${level + 1}` },
    ...SIDES.map((name) => buildCell(line[name])),
  );
}

function isLinked({ left, right }) {
  return left && right && (partnerOf(left) === right || partnerOf(right) === left);
}

function buildCell(row) {
  if (!row) return make("div", { role: "gridcell", class: "cell none" });
  const cell = make(
    "div",
    { role: "gridcell", class: `cell ${row.state}`, id: `${row.side}-${row.index}`, tabindex: -1,
      "aria-describedby": "detail" },
    make("span", { class: "glyph", "aria-hidden": "true" }, GLYPHS[row.state]),
    make("span", { class: "operation" }, row.operation),
    make("span", { class: "where" }, row.where),
    make("span", { class: "code" }, row.code),
    make("span", { class: "unseen" }, `, ${row.state}`),
  );
  if (first[row.side] === row) cell.children[1].append(make("b", { class: "first" }, "first"));
  cell.row = row;
  return cell;
}

function update(item, element) {
  element.style.top = `${item.position * rowHeight}px`;
  element.setAttribute("aria-rowindex", item.position + 2);
  if (item instanceof Node) element.tabIndex = item === active ? 0 : -1;
  else for (const cell of element.children) if (cell.row) updateCell(cell);
}

function updateCell(cell) {
  const partner = selected && partnerOf(selected);
  cell.classList.toggle("lit", cell.row === selected);
  cell.classList.toggle("partner", cell.row === partner);
  cell.tabIndex = cell === cellOf(active) ? 0 : -1;
}

// The cell of a line on the side on which the keys move, or on the only one that it has.
function cellOf(item) {
  if (!item || item instanceof Node) return null;
  const row = item[side] ?? item[other(side)];
  return [...elements.get(item).children].find((cell) => cell.row === row);
}

function select(row) {
  if (row === selected) return;
  selected = row;
  detail.replaceChildren(...detailOf(row));
  for (const item of elements.keys()) if (!(item instanceof Node)) update(item, elements.get(item));
}

function focusOn(item) {
  if (!item) return;
  active = item;
  scrollTo(item);
  draw();
  (item instanceof Node ? elements.get(item) : cellOf(item)).focus({ preventScroll: true });
}

function scrollTo(item) {
  const top = item.position * rowHeight;
  const head = tree.firstElementChild.offsetHeight;
  if (top < tree.scrollTop) tree.scrollTop = top;
  const below = top + rowHeight + head - tree.clientHeight;
  if (below > tree.scrollTop) tree.scrollTop = below;
}

// Unfolds what holds a row, takes filters away that hide it, and moves the focus there.
function reveal(row) {
  if (!row.line.matches) filters.clear();
  openPathTo(row.line);
  flatten();
  side = row.side;
  tree.scrollTop = (row.line.position + 0.5) * rowHeight - tree.clientHeight / 2;
  focusOn(row.line);
  tree.scrollIntoView({ block: "nearest" });
}

function toggle(node) {
  setOpen(node, !isOpen(node));
  flatten();
}

function foldAll(open) {
  eachNode(root, (node) => setOpen(node, open || node.level < 2));
  flatten();
}

function onPoint(event) {
  const { row } = event.target.closest(".cell") ?? {};
  if (row) select(row);
}

function onFocus(event) {
  const item = event.target.closest(".row")?.item;
  if (!item) return;
  active = item;
  if (event.target.row) {
    if (item.left && item.right) side = event.target.row.side;
    select(event.target.row);
  }
  draw();
}

function onClick(event) {
  const item = event.target.closest(".row")?.item;
  if (item instanceof Node) {
    active = item;
    toggle(item);
  }
}

function measureRow() {
  rowHeight = parseFloat(getComputedStyle(body).lineHeight);
  flatten();
}

function startGrid() {
  const heads = ["Left program", "Right program"].map((name) =>
    make("div", { role: "columnheader", class: "cell" }, name));
  const head = make("div", { role: "row", class: "head", "aria-rowindex": 1 }, ...heads);
  tree.append(make("div", { role: "rowgroup" }, head), body);
  tree.addEventListener("scroll", () => requestAnimationFrame(draw));
  tree.addEventListener("keydown", onKey);
  tree.addEventListener("mouseover", onPoint);
  tree.addEventListener("focusin", onFocus);
  tree.addEventListener("click", onClick);
  new ResizeObserver(() => requestAnimationFrame(measureRow)).observe(tree);
  measureRow();
  const hint = "Point at an operation, or move to it, to see its partner and its details.";
  detail.append(make("p", { class: "soft" }, hint));
}
