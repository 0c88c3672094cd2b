// What a step was: shown beside the pointer. A skipped step within a few pixels of it goes first.

const TIP = Object.assign(document.createElement("div"), { className: "tip", hidden: true });
TIP.setAttribute("role", "status");
document.body.append(TIP);
const NEAR = 6;

function pointed(u) {
  const { left, top, idx } = u.cursor;
  if (left < 0 || idx === null || idx === undefined) {
    TIP.hidden = true;
    return;
  }
  if (!u.root.matches(":hover")) return; // it follows another plot
  const step = skipNear(u, left) ?? u.data[0][idx];
  if (step === undefined) return;
  TIP.replaceChildren(...described(step, PLOTS.find((plot) => plot.u === u)));
  TIP.hidden = false;
  place(u.over.getBoundingClientRect(), left, top);
}

function skipNear(u, left) {
  let [found, nearest] = [undefined, NEAR];
  for (const run of RUNS.filter((run) => run.shown).flatMap((run) => [run, run.undone])) {
    const at = before(run.skips.length ? skipSteps(run) : [], u.posToVal(left, "x"));
    for (const k of [at, at + 1]) {
      if (k < 0 || k >= run.skips.length) continue;
      const step = run.steps[run.skips[k]];
      const far = Math.abs(u.valToPos(step, "x") - left);
      if (far < nearest) [found, nearest] = [step, far];
    }
  }
  return found;
}

function skipSteps(run) {
  run.skipSteps ??= run.skips.map((i) => run.steps[i]);
  return run.skipSteps;
}

function described(step, plot) {
  const parts = [line("b", `step ${step.toLocaleString("en")}`)];
  RUNS.forEach((run, r) => {
    if (!run.shown) return;
    const i = positionOf(run, step);
    const gone = positionOf(run.undone, step);
    if (i < 0 && gone < 0 && !(plot.sparse && run.updates.steps.includes(step))) return;
    if (RUNS.length > 1) parts.push(line("div", run.name, `name ${run.bare ? "bare" : `run-${r % 8}`}`));
    if (i >= 0) parts.push(...ofStep(run, i));
    parts.push(...ofUpdate(run, step));
    for (const start of run.starts.filter((start) => start.step === step)) parts.push(line("div", start.what));
    if (gone >= 0) parts.push(...ofUndone(run, gone));
    parts.push(...ofRewinds(run, step));
  });
  return parts;
}

function ofStep(run, i) {
  if (run.bare) return ofBareStep(run, i);
  const reason = DATA.reasons[run.reason[i]];
  const worst = run.worst[i] < 0 ? "" : run.names[run.worst[i]];
  const clipped = reason.applied && run.norm[i] > run.threshold[i] ? ` (clipped at ${short(run.threshold[i])})` : "";
  const facts = [`gradient norm ${number(run.norm[i])}${clipped}`];
  if (!Number.isNaN(run.loss[i]) || reason.name === "NONFINITE_LOSS") facts.unshift(`loss ${number(run.loss[i])}`);
  if (run.moved.length > 0) facts.push(`distance from the start ${number(run.moved[i])}`);
  if (SCALED) facts.push(`loss scale ${number(run.scale[i])}`);
  const out = facts.map((text) => line("div", text));
  if (reason.name !== "OK") out.unshift(line("div", `${reason.name}: ${reason.what}`, reason.applied ? "" : "bad"));
  if (worst) out.push(line("div", `worst parameter: ${worst}`, "soft"));
  return out;
}

function ofUndone(run, i) {
  const { reason, loss, norm, worst } = run.undone;
  const { name, what, applied } = DATA.reasons[reason[i]];
  const at = worst[i] < 0 ? "" : `, worst parameter: ${run.names[worst[i]]}`;
  const why = applied ? "" : `, skipped for ${name}: ${what}`;
  return [line("div", `before the run went back: loss ${number(loss[i])}, gradient norm ${number(norm[i])}${at}${why}`, "undone")];
}

function ofRewinds(run, step) {
  const around = run.rewinds.filter(({ first, last }) => first <= step && step <= Math.max(first, last));
  return around.slice(-3).map(({ text }) => line("div", text, "why"));
}

function ofBareStep(run, i) {
  const facts = Number.isNaN(run.loss[i]) ? [] : [`loss ${number(run.loss[i])}`];
  if (run.moved.length > 0) facts.push(`distance from the start ${number(run.moved[i])}`);
  return facts.map((text) => line("div", text));
}

function ofUpdate(run, step) {
  const k = run.updates.steps.indexOf(step);
  if (k < 0) return [];
  const name = run.updates.names[k] === null ? "" : `, ${run.updates.names[k]}`;
  return [line("div", `update ${number(run.updates.size[k])} (largest ${number(run.updates.largest[k])}${name})`)];
}

function number(value) {
  return Number.isFinite(value) ? short(value) : value > 0 ? "inf" : "not finite";
}

function line(tag, text, kind = "") {
  return Object.assign(document.createElement(tag), { textContent: text, className: kind });
}

function place(over, left, top) {
  const [x, y] = [over.left + left, over.top + top];
  const { width, height } = TIP.getBoundingClientRect();
  const beside = x + 16 + width < innerWidth ? x + 16 : Math.max(4, x - 16 - width);
  TIP.style.left = `${Math.min(beside, Math.max(4, innerWidth - width - 4))}px`;
  TIP.style.top = `${Math.max(4, Math.min(y + 16, innerHeight - height - 4))}px`;
}

addEventListener("scroll", () => { TIP.hidden = true; }, { passive: true });
