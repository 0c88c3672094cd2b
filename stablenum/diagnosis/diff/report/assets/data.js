// The rows of both programs, and the lines in which they stand.

const GLYPHS = { equal: "=", rounding: "≈", unmatched: "∘", follows: "↳", different: "≠" };
const MEANINGS = {
  equal: "The other side has the same value, also as the programs are.",
  rounding: "The other side has the same value in float64; only rounding distinguishes them.",
  unmatched: "No counterpart on the other side, but nothing that differs depends on it.",
  follows: "On the way to a result that differs, like one of its inputs.",
  different: "On the way to a result that differs, while none of its inputs is.",
};
const SIDES = ["left", "right"];

const data = JSON.parse(document.getElementById("data").textContent);
const rows = { left: rowsOf("left"), right: rowsOf("right") };
const lines = linesOf(data.lines);
const first = { left: rows.left[data.first[0]], right: rows.right[data.first[1]] };

function rowsOf(side) {
  const columns = data[side];
  const text = (name, i) => data.strings[columns[name][i]];
  return columns.operation.map((_, i) => ({
    side,
    index: i,
    operation: text("operation", i),
    where: text("where", i),
    code: text("code", i),
    module: text("module", i),
    phase: text("phase", i),
    state: text("state", i),
    step: columns.step[i],
    partner: columns.partner[i],
    error: columns.error[i],
    allowed: columns.allowed[i],
    off: columns.off[i],
    line: null,
  }));
}

function linesOf(columns) {
  return columns.left.map((_, i) => {
    const line = { index: i, module: data.strings[columns.module[i]], parent: null, matches: true };
    for (const side of SIDES) {
      line[side] = rows[side][columns[side][i]] ?? null;
      if (line[side]) line[side].line = line;
    }
    return line;
  });
}

function other(side) {
  return side === "left" ? "right" : "left";
}

// The row of the other side that has the same value, or at which that side begins to differ too.
function partnerOf(row) {
  if (row.partner !== null) return rows[other(row.side)][row.partner];
  return first[row.side] === row ? first[other(row.side)] : undefined;
}

function counted(number) {
  return number.toLocaleString("en");
}

// Numbers that are not finite arrive as texts.
function shown(number) {
  if (number === null) return "not known";
  if (typeof number === "string") return number;
  return number === 0 ? "0" : number.toExponential(1);
}

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}
