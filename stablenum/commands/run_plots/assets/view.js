// Which steps are shown: the same in all plots.

const VIEW = { least: FIRST, most: LAST };
const RANGE = PAGE.querySelector(".range");

function show(least, most) {
  const width = Math.min(LAST - FIRST, Math.max(2, most - least));
  VIEW.least = Math.min(Math.max(FIRST, least), LAST - width);
  VIEW.most = VIEW.least + width;
  for (const plot of PLOTS) plot.u?.setScale("x", { min: VIEW.least, max: VIEW.most });
  tell();
}

function tell() {
  if (RANGE === null) return;
  const [least, most] = [Math.ceil(VIEW.least), Math.floor(VIEW.most)];
  RANGE.textContent = `steps ${least.toLocaleString("en")} to ${most.toLocaleString("en")}`;
}

// A plot has been zoomed by dragging.
function follow(u) {
  const { min, max } = u.scales.x;
  if (min === null || (min === VIEW.least && max === VIEW.most)) return;
  show(min, max);
}

function zoom(factor) {
  const [middle, half] = [(VIEW.least + VIEW.most) / 2, (VIEW.most - VIEW.least) / 2];
  show(middle - half * factor, middle + half * factor);
}

function move(share) {
  const by = share * (VIEW.most - VIEW.least);
  show(VIEW.least + by, VIEW.most + by);
}

const ACTIONS = {
  all: () => show(FIRST, LAST), in: () => zoom(1 / 2), out: () => zoom(2), back: () => move(-1 / 4), on: () => move(1 / 4),
};
const KEYS = { "+": "in", "=": "in", "-": "out", 0: "all", ArrowLeft: "back", ArrowRight: "on" };

for (const button of PAGE.querySelectorAll("button[data-action]")) {
  button.addEventListener("click", ACTIONS[button.dataset.action]);
}
ROOT.addEventListener("keydown", (event) => {
  const action = event.ctrlKey || event.metaKey || event.altKey ? undefined : KEYS[event.key];
  if (action === undefined) return;
  event.preventDefault();
  ACTIONS[action]();
});
