// One plot below the other, drawn by uPlot, over the same steps.

const ROOT = PAGE.querySelector(".plots");
const STYLE = getComputedStyle(document.documentElement);
const COLOURS = new Map(); // of the theme: to ask for a style takes time
function colour(name) {
  if (!COLOURS.has(name)) COLOURS.set(name, STYLE.getPropertyValue(`--${name}`).trim());
  return COLOURS.get(name);
}
const colourOf = (r) => colour(RUNS[r].bare ? "bad" : `run-${r % 8}`);
const GUARDED = RUNS.filter((run) => !run.bare);
const HEIGHT = Number(ROOT.dataset.height ?? 210);
const KEY = `steps ${PAGE.id ?? ""}`; // zoomed and pointed at together
const TICK = 8;
const WIDTH = AXIS.length > 5000 ? 1 : 1.5; // a dense line is drawn much faster by the width of a pixel

const SCALED = GUARDED.some((run) => run.scale.some((value) => value !== 1));

// What was undone is drawn first, below the rest.
function undone(name) {
  const line = { of: (run) => run.undone[name], at: (run) => run.undone.steps, what: "undone", colour: "undone", gaps: true };
  return UNDONE ? [line] : [];
}

const PLOTS = [
  { name: "Loss", lines: [...undone("loss"), { of: (run) => run.loss }], log: isWide("loss") },
  {
    name: "Gradient norm", log: true,
    lines: [...undone("norm"), { of: (run) => run.norm }, { of: (run) => run.threshold, dash: [6, 4], what: "clip threshold", colour: "ink" }],
  },
  {
    name: "Distance from the start", log: true, lines: [{ of: (run) => run.moved }],
    only: RUNS.some((run) => run.moved.length > 0),
  },
  { name: "Loss scale", log: true, base: 2, lines: [{ of: (run) => run.scale, stepped: true }], only: SCALED },
  {
    name: "Update, relative to the parameters", log: true, sparse: true, only: UPDATE_AXIS.length > 0,
    lines: [{ of: (run) => run.updates.size },
      { of: (run) => run.updates.largest, dash: [2, 3], what: "largest of a parameter" }],
  },
].filter((plot) => plot.only !== false);

// Whether a logarithmic axis shows more: all positive, and far apart.
function isWide(name) {
  let least = Infinity, most = 0;
  for (const run of RUNS) {
    for (const value of [run[name], run.undone[name]].flatMap((values) => Array.from(values))) {
      if (value <= 0) return false;
      if (Number.isFinite(value)) { least = Math.min(least, value); most = Math.max(most, value); }
    }
  }
  return most > 30 * least;
}

// The columns of a plot, in the order in which they are drawn: the first line of each run, then the second.
function byLine(plot, make) {
  return plot.lines.flatMap((line) => RUNS.map((run, r) => make(run, r, line)));
}

function dataOf(plot) {
  const axis = plot.sparse ? UPDATE_AXIS : AXIS;
  const columns = byLine(plot, (run, r, line) =>
    along(axis, line.at?.(run) ?? (plot.sparse ? run.updates.steps : run.steps), line.of(run), plot.log));
  return [axis, ...columns];
}

function seriesOf(plot) {
  return byLine(plot, (run, r, line) => ({
    label: `${run.name} ${line.what ?? plot.name}`, scale: "y", show: run.shown, spanGaps: !line.gaps,
    stroke: () => line.colour ? colour(line.colour) : colourOf(r), width: line.dash ? 1 : WIDTH,
    dash: line.dash ?? (run.bare ? [5, 4] : undefined), alpha: RUNS.length > 1 ? 0.75 : 1,
    paths: line.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
    points: line.dash || line.stepped ? { show: false } : {},
  }));
}

// Draw within the plot's own area, and leave the settings of the canvas as they were.
function inside(u, draw) {
  const { left, top, width, height } = u.bbox;
  u.ctx.save();
  u.ctx.beginPath();
  u.ctx.rect(left, top, width, height);
  u.ctx.clip();
  draw(u, u.bbox, devicePixelRatio);
  u.ctx.restore();
}

// The steps that each rewind undid, below the lines.
function bands(u, { top, height }, ratio) {
  RUNS.filter((run) => run.shown).forEach((run) => {
    for (const { first, last } of run.rewinds) {
      const [from, to] = [first, Math.max(first, last)].map((step) => u.valToPos(step, "x", true));
      u.ctx.globalAlpha = 0.18;
      u.ctx.fillStyle = colour("undone");
      u.ctx.fillRect(from, top, Math.max(2 * ratio, to - from), height);
    }
  });
}

function marks(u, { left, top, width, height }, ratio) {
  let row = 0;
  RUNS.forEach((run, r) => {
    if (!run.shown) return;
    const ticks = ({ steps, skips }, style) => {
      u.ctx.fillStyle = style;
      let last = -Infinity;
      for (const i of skips) {
        const x = Math.round(u.valToPos(steps[i], "x", true));
        if (x === last || x < left || x > left + width) continue;
        last = x;
        u.ctx.fillRect(x - ratio, top + row * TICK * ratio, 2 * ratio, (TICK - 1) * ratio);
      }
    };
    ticks(run.undone, colour("undone"));
    ticks(run, GUARDED.length > 1 ? colourOf(r) : colour("bad"));
    row += 1;
    u.ctx.strokeStyle = colour("soft");
    u.ctx.setLineDash([3 * ratio, 3 * ratio]);
    u.ctx.lineWidth = ratio;
    for (const step of [...run.starts.map((start) => start.step), ...run.rewinds.map((rewind) => rewind.first)]) {
      const x = Math.round(u.valToPos(step, "x", true)) + 0.5;
      u.ctx.beginPath();
      u.ctx.moveTo(x, top);
      u.ctx.lineTo(x, top + height);
      u.ctx.stroke();
    }
  });
}

function short(value) {
  if (value === null || value === undefined) return "";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return value.toLocaleString("en");
  if (size >= 1e5 || size < 1e-3) return value.toExponential().replace("e+", "e").replace(/(\.\d\d)\d+/, "$1");
  return String(Number(value.toPrecision(4)));
}

function axes() {
  const common = {
    stroke: () => colour("soft"), grid: { stroke: () => colour("line"), width: 1 },
    ticks: { stroke: () => colour("line"), width: 1, size: 5 }, font: "12px system-ui, sans-serif",
  };
  const steps = (u, values) => values.map((value) => Number.isInteger(value) ? value.toLocaleString("en") : "");
  return [{ ...common, values: steps }, { ...common, size: 62, values: (u, values) => values.map(short) }];
}

function make(plot) {
  plot.u?.destroy();
  plot.u = new uPlot({
    width: widthNow(plot), height: HEIGHT, legend: { show: false },
    cursor: {
      drag: { x: true, y: false }, points: { size: 7 },
      sync: { key: KEY, scales: ["x", null], filters: { pub: (type) => type.startsWith("mouse")
        && type !== "mousedown" && type !== "mouseup" } },
    },
    scales: {
      x: { time: false, auto: false, range: (u, least, most) => [least ?? FIRST, most ?? LAST] },
      y: { distr: plot.log ? 3 : 1, log: plot.base ?? 10 },
    },
    axes: axes(), series: [{ label: "step" }, ...seriesOf(plot)],
    hooks: {
      drawClear: [(u) => inside(u, bands)],
      draw: [(u) => inside(u, marks)],
      setScale: [(u, key) => { if (key === "x") follow(u); }],
      setCursor: [pointed],
    },
  }, dataOf(plot), plot.place);
  plot.u.over.addEventListener("dblclick", () => show(FIRST, LAST));
  plot.u.setScale("x", { min: VIEW.least, max: VIEW.most });
}

function widthNow(plot) {
  return Math.max(240, plot.place.clientWidth);
}

function isKnown(line) {
  return RUNS.some((run) => line.of(run).some(Number.isFinite));
}

function styleOf(line) {
  const [drawn, gap] = line.dash;
  return drawn < gap ? "dotted" : "dashed";
}

function frame(plot) {
  const figure = document.createElement("figure");
  const caption = document.createElement("figcaption");
  caption.append(Object.assign(document.createElement("b"), { textContent: plot.name }));
  for (const line of plot.lines.filter((line) => line.dash && isKnown(line))) {
    caption.append(Object.assign(document.createElement("span"), { className: "soft", textContent: `${styleOf(line)}: ${line.what}` }));
  }
  if (plot.lines.some((line) => line.gaps)) {
    caption.append(Object.assign(document.createElement("span"), { className: "soft", textContent: "grey: undone" }));
  }
  const label = document.createElement("label");
  const box = Object.assign(document.createElement("input"), { type: "checkbox", checked: plot.log });
  box.addEventListener("change", () => { plot.log = box.checked; make(plot); });
  label.append(box, " logarithmic");
  caption.append(label);
  plot.place = document.createElement("div");
  plot.place.setAttribute("role", "img");
  plot.place.setAttribute("aria-label", `${plot.name} over the steps of ${RUNS.map((run) => run.name).join(", ")}`);
  figure.append(caption, plot.place);
  ROOT.append(figure);
}
