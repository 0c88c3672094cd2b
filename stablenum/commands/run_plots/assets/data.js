// The steps of all runs on one axis. A value that a run does not have, or that is not finite, is null.

function decoded(text, Kind) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return new Kind(bytes.buffer);
}

function column(stored, count) {
  if ("base64" in stored) return decoded(stored.base64, Float32Array);
  const out = new Float32Array(count).fill(NaN);
  stored.at.forEach((from, k) => {
    const value = stored.values[k];
    out.fill(value === null ? NaN : value, from, stored.at[k + 1] ?? count);
  });
  return out;
}

function undoneOf({ count, steps, reason, worst, loss, norm }) {
  const undone = {
    steps: decoded(steps, Int32Array), reason: decoded(reason, Uint8Array), worst: decoded(worst, Int32Array),
    loss: column(loss, count), norm: column(norm, count), skips: [],
  };
  for (let i = 0; i < count; i++) if (!DATA.reasons[undone.reason[i]].applied) undone.skips.push(i);
  return undone;
}

function stepsOf(run) {
  if ("base64" in run.steps) return decoded(run.steps.base64, Int32Array);
  return Int32Array.from({ length: run.count }, (_, i) => run.steps.from + i);
}

const RUNS = DATA.runs.map((run) => {
  const count = run.count;
  const reason = decoded(run.reason, Uint8Array);
  const skips = [];
  for (let i = 0; i < count; i++) if (!DATA.reasons[reason[i]].applied) skips.push(i);
  return {
    name: run.name, names: run.names, starts: run.starts, bare: run.bare ?? false, shown: true,
    steps: stepsOf(run), reason, skips,
    worst: decoded(run.worst, Int32Array), loss: column(run.loss, count), norm: column(run.norm, count),
    threshold: column(run.threshold, count), scale: column(run.scale, count), updates: run.updates,
    moved: run.moved ? column(run.moved, count) : [],
    undone: undoneOf(run.undone), rewinds: run.rewinds,
  };
});

function same(a, b) {
  return a.length === b.length && a.every((value, i) => value === b[i]);
}

function union(lists) {
  if (lists.slice(1).every((list) => same(list, lists[0]))) return Array.from(lists[0] ?? []);
  const all = Float64Array.from(lists.flatMap((list) => Array.from(list))).sort();
  return Array.from(all.filter((value, i) => i === 0 || value !== all[i - 1]));
}

// The values of one run at the steps of the axis; where `positive`, those that a logarithm has.
function along(axis, steps, values, positive) {
  const out = new Array(axis.length).fill(null);
  for (let i = 0, at = 0; i < steps.length; i++, at++) {
    while (axis[at] < steps[i]) at++;
    const value = values[i];
    if (value !== null && Number.isFinite(value) && (!positive || value > 0)) out[at] = value;
  }
  return out;
}

// The position of the last number that is not above `x`, or -1.
function before(sorted, x) {
  let low = -1;
  for (let high = sorted.length; high - low > 1;) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= x) low = middle; else high = middle;
  }
  return low;
}

function positionOf(run, step) {
  const at = before(run.steps, step);
  return at >= 0 && run.steps[at] === step ? at : -1;
}

const UNDONE = RUNS.some((run) => run.undone.steps.length > 0);
const AXIS = union(RUNS.flatMap((run) => (UNDONE ? [run.steps, run.undone.steps] : [run.steps])));
const UPDATE_AXIS = union(RUNS.map((run) => run.updates.steps));
const FIRST = AXIS[0] ?? 0;
const LAST = Math.max(AXIS[AXIS.length - 1] ?? 1, FIRST + 1);
