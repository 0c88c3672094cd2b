// The error of each pair of operations by its position, on a logarithmic axis.

const SIZE = { height: 300, left: 52, right: 14, top: 26, strip: 26 };
const MIN_WIDTH = 200;
const LANE = 24; // for errors of 0, and for those that are not finite
const plot = document.getElementById("plot");
const tip = make("div", { class: "tip", hidden: "" });
const points = pointsOf(lines);
let drawn = null; // the scales of the plot, once it is drawn
let chosen = 0;

function pointsOf(lines) {
  const found = [];
  for (const line of lines) {
    const { left, right } = line;
    if (left && left.error !== null) found.push(left);
    if (right && right.error !== null && !(left && left.partner === right.index)) found.push(right);
  }
  return found;
}

function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function scalesOf(width) {
  const sizes = points.flatMap((row) => [row.error, row.allowed]);
  const logs = sizes.filter((x) => typeof x === "number" && x > 0).map(Math.log10);
  const low = Math.floor(logs.reduce((a, b) => Math.min(a, b), -1));
  const high = Math.ceil(logs.reduce((a, b) => Math.max(a, b), low + 1));
  const bottom = SIZE.height - SIZE.strip - (points.some((row) => row.error === 0) ? LANE : 0);
  const top = SIZE.top + (points.some((row) => typeof row.error === "string") ? LANE : 0);
  const across = (width - SIZE.left - SIZE.right) / Math.max(1, lines.length);
  const log = (value) => bottom - ((Math.log10(value) - low) / (high - low)) * (bottom - top - 6);
  return {
    width, low, high, bottom, top, across,
    x: (line) => SIZE.left + (line.index + 0.5) * across,
    y: (value) => {
      if (typeof value === "string") return SIZE.top + LANE / 2;
      return value > 0 ? log(value) : bottom + LANE / 2;
    },
  };
}

function drawPlot() {
  drawn = scalesOf(Math.max(MIN_WIDTH, plot.clientWidth));
  const picture = svg("svg", { width: drawn.width, height: SIZE.height, "aria-hidden": "true" });
  picture.append(...axis(drawn), ...parts(drawn), ...tolerance(drawn), ...marks(drawn), ...strips(drawn),
    ...frontier(drawn), svg("circle", { class: "cursor", r: 6, visibility: "hidden" }));
  plot.replaceChildren(picture, tip, legend());
}

function axis({ low, high, width, y, bottom }) {
  const every = Math.ceil((high - low) / 6);
  const found = [];
  for (let power = low; power <= high; power += every) found.push([`1e${power}`, y(10 ** power)]);
  if (bottom < SIZE.height - SIZE.strip) found.push(["0", y(0)]);
  if (points.some((row) => typeof row.error === "string")) found.push(["nan, inf", y("nan")]);
  return found.flatMap(([label, at]) => [
    svg("line", { class: "grid", x1: SIZE.left, x2: width - SIZE.right, y1: at, y2: at }),
    svg("text", { x: SIZE.left - 8, y: at + 4, "text-anchor": "end" }, label),
  ]);
}

// Lines between forward pass, backward pass and update, and their names where there is room.
function parts({ x, across }) {
  return root.items.flatMap((node) => {
    const start = x(node.lines[0]) - across / 2;
    const room = node.lines.length * across > 8 * node.name.length;
    return [
      svg("line", { class: "part", x1: start, x2: start, y1: 8, y2: SIZE.height }),
      ...(room ? [svg("text", { x: start + 6, y: 17 }, node.name)] : []),
    ];
  });
}

function tolerance({ x, y, bottom }) {
  const known = points.filter((row) => row.allowed > 0 && typeof row.allowed === "number");
  if (!known.length) return [];
  const steps = known.map((row) => `${x(row.line).toFixed(1)} ${y(row.allowed).toFixed(1)}`).join("L");
  const [from, to] = [x(known[0].line), x(known.at(-1).line)];
  return [
    svg("path", { class: "explained", d: `M${from} ${bottom}L${steps}L${to} ${bottom}Z` }),
    svg("path", { class: "allowed", d: `M${steps}` }),
  ];
}

// Dots of no length with round ends; errors on the way to a difference are diamonds.
function marks({ x, y }) {
  const paths = { equal: "", rounding: "", unmatched: "", follows: "", different: "" };
  for (const row of points) {
    const [at, up] = [x(row.line).toFixed(1), y(row.error).toFixed(1)];
    paths[row.state] += row.state === "different" ? `M${at} ${up - 4}l4 4l-4 4l-4 -4z` : `M${at} ${up}h0`;
  }
  return Object.entries(paths).map(([state, d]) => svg("path", { class: `mark ${state}`, d }));
}

// A strip for each side: the more a state matters, the higher its bar.
function strips({ x, across }) {
  const heights = { equal: 3, rounding: 4, unmatched: 5, follows: 6, different: 9 };
  return SIDES.flatMap((side, number) => {
    const base = SIZE.height - SIZE.strip + 14 + number * 11;
    return runs(side).map(({ state, from, to }) =>
      svg("rect", { class: `run ${state}`, x: x(lines[from]) - across / 2, width: (to - from + 1) * across,
        y: base - heights[state], height: heights[state] }));
  });
}

function runs(side) {
  const found = [];
  for (const line of lines) {
    const state = line[side]?.state;
    const last = found.at(-1);
    if (last && last.state === state && last.to === line.index - 1) last.to = line.index;
    else if (state) found.push({ state, from: line.index, to: line.index });
  }
  return found;
}

function frontier({ x, width }) {
  const row = first.left ?? first.right;
  if (!row) return [];
  const at = x(row.line);
  const end = at > width * 0.7;
  return [
    svg("line", { class: "frontier", x1: at, x2: at, y1: 22, y2: SIZE.height }),
    svg("text", { class: "frontier", x: at + (end ? -6 : 6), y: 34, "text-anchor": end ? "end" : "start" },
      "first difference"),
  ];
}

function legend() {
  const present = Object.keys(GLYPHS).filter((state) => points.some((row) => row.state === state));
  const items = present.map((state) =>
    make("span", { class: `key ${state}` }, state === "different" ? "◆" : "●", ` ${state}`));
  const allowed = make("span", { class: "key allowed" }, "▬ explained by rounding");
  return make("p", { class: "legend", "aria-hidden": "true" }, ...items, allowed);
}

function nearest(event) {
  const box = plot.getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top];
  let best = -1;
  let least = Infinity;
  points.forEach((row, i) => {
    const away = (drawn.x(row.line) - x) ** 2 + 0.1 * (drawn.y(row.error) - y) ** 2;
    if (away < least) [best, least] = [i, away];
  });
  return best;
}

function point(index) {
  chosen = index;
  const row = points[index];
  const [x, y] = [drawn.x(row.line), drawn.y(row.error)];
  const cursor = plot.querySelector(".cursor");
  cursor.setAttribute("cx", x);
  cursor.setAttribute("cy", y);
  cursor.setAttribute("visibility", "visible");
  const place = row.module ? `${row.where}, ${row.module}` : row.where;
  const size = `error ${shown(row.error)}, allowed ${shown(row.allowed)}`;
  tip.replaceChildren(make("b", {}, row.operation), make("span", {}, place), make("span", {}, size));
  tip.hidden = false;
  tip.style.left = `${Math.max(0, Math.min(x + 12, drawn.width - tip.offsetWidth))}px`;
  tip.style.top = `${y < 120 ? y + 14 : y - tip.offsetHeight - 12}px`;
  plot.setAttribute("aria-valuenow", index + 1);
  plot.setAttribute("aria-valuetext", `${row.operation}, ${place}, ${row.state}, ${size}`);
}

function unpoint() {
  tip.hidden = true;
  plot.querySelector(".cursor").setAttribute("visibility", "hidden");
}

function onPlotKey(event) {
  const last = points.length - 1;
  const far = Math.max(1, Math.round(points.length / 20));
  const to = { ArrowLeft: chosen - 1, ArrowDown: chosen - 1, ArrowRight: chosen + 1, ArrowUp: chosen + 1,
    PageUp: chosen + far, PageDown: chosen - far, Home: 0, End: last }[event.key];
  if (to === undefined && event.key !== "Enter") return;
  event.preventDefault();
  if (to === undefined) reveal(points[chosen]);
  else point(Math.max(0, Math.min(last, to)));
}

function startPlot() {
  if (!points.length) {
    plot.closest("section").remove();
    return;
  }
  const start = first.left ?? first.right;
  chosen = start ? Math.max(0, points.findIndex((row) => row.line.index >= start.line.index)) : 0;
  plot.setAttribute("aria-valuemax", points.length);
  plot.setAttribute("aria-valuenow", chosen + 1);
  new ResizeObserver(() => plot.clientWidth && plot.clientWidth !== drawn.width && drawPlot()).observe(plot);
  drawPlot();
  plot.addEventListener("mousemove", (event) => point(nearest(event)));
  plot.addEventListener("mouseleave", unpoint);
  plot.addEventListener("focus", () => plot.matches(":focus-visible") && point(chosen));
  plot.addEventListener("blur", unpoint);
  plot.addEventListener("keydown", onPlotKey);
  plot.addEventListener("click", (event) => reveal(points[nearest(event)]));
}
