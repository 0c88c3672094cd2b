// The modules as a tree: its leaves are lines, and an open node shows what is in it.

const FEW_LINES = 60;

class Node {
  constructor(name, parent) {
    Object.assign(this, { name, parent, items: [], lines: [], open: true, closedByUser: false });
  }

  get level() {
    return this.parent ? this.parent.level + 1 : 0;
  }

  add(name) {
    const child = new Node(name, this);
    this.items.push(child);
    return child;
  }

  take(line) {
    this.items.push(line);
    line.parent = this;
    for (let node = this; node; node = node.parent) node.lines.push(line);
  }

  // The rows of a side that a filter leaves.
  rowsOf(side) {
    return this.lines.filter((line) => line.matches && line[side]).map((line) => line[side]);
  }
}

function segments(module) {
  return module ? module.split(/(?<=[./])/) : [];
}

function partOf(line) {
  const { phase, step } = line.left ?? line.right;
  return rows.steps > 1 ? `step ${step}, ${phase}` : phase;
}

function treeOf(lines) {
  const root = new Node("", null);
  let path = [root];
  for (const line of lines) {
    const names = [partOf(line), ...segments(line.module)];
    let common = 0;
    while (common < names.length && path[common + 1]?.name === names[common]) common++;
    path = path.slice(0, common + 1);
    for (const name of names.slice(common)) path.push(path.at(-1).add(name));
    path.at(-1).take(line);
  }
  root.items.forEach(simplify);
  return root;
}

// A module that holds one module and nothing else is shown with it in one node.
function simplify(node) {
  while (node.level > 1 && node.items.length === 1 && node.items[0] instanceof Node) {
    node.name += node.items[0].name;
    node.items = node.items[0].items;
    for (const item of node.items) item.parent = node;
  }
  for (const item of node.items) if (item instanceof Node) simplify(item);
}

// The longest path that the modules of a side have in common.
function commonModule(found) {
  const paths = found.filter((row) => row.module).map((row) => segments(row.module));
  if (!paths.length) return "";
  const [one, ...others] = paths;
  let length = one.length;
  for (const path of others) {
    while (length && one.slice(0, length).join("") !== path.slice(0, length).join("")) length--;
  }
  return tidy(one.slice(0, length).join(""));
}

function tidy(path) {
  return path.replace(/[./]$/, "");
}

function countsOf(found) {
  const counts = { different: 0, follows: 0, unmatched: 0, rounding: 0, equal: 0 };
  for (const row of found) counts[row.state]++;
  return counts;
}

function eachNode(node, act) {
  act(node);
  for (const item of node.items) if (item instanceof Node) eachNode(item, act);
}

function openPathTo(line) {
  for (let node = line.parent; node; node = node.parent) {
    Object.assign(node, { open: true, closedByUser: false });
  }
}

// Open at first: the phases, modules of modules directly below them, and the way to the first difference.
function foldAtFirst(root) {
  const holdsModules = ({ items }) => items.every((item) => item instanceof Node);
  const isOpen = (node) => node.level < 2 || (node.level === 2 && holdsModules(node));
  if (lines.length > FEW_LINES) eachNode(root, (node) => (node.open = isOpen(node)));
  for (const side of SIDES) if (first[side]) openPathTo(first[side].line);
}

rows.steps = rows.left.concat(rows.right).reduce((most, row) => Math.max(most, row.step), 1);
const root = treeOf(lines);
foldAtFirst(root);
