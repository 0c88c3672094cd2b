// What is known of the operation under the pointer or the focus, beside its partner.

function detailOf(row) {
  const partner = partnerOf(row);
  const both = { [row.side]: row, [other(row.side)]: partner };
  return [
    make("div", { class: "sides" }, ...SIDES.map((side) => describe(side, both[side]))),
    make("p", { class: "numbers" }, ...numbersOf(row)),
    ...(partner && partner.line !== row.line ? [goTo(partner)] : []),
  ];
}

function describe(side, row) {
  const name = side === "left" ? "Left" : "Right";
  if (!row) return make("div", {}, make("h3", {}, name), make("p", { class: "soft" }, "no partner"));
  const module = row.module ? [" in ", make("code", {}, row.module)] : [];
  const step = rows.steps > 1 ? `, step ${row.step}` : "";
  return make(
    "div",
    {},
    make("h3", {}, name),
    make("p", {}, make("code", { class: "place" }, row.where), " ", make("b", {}, row.operation), ...module,
      make("span", { class: "soft" }, `, ${row.phase}${step}`)),
    make("pre", {}, row.code || " "),
  );
}

function numbersOf(row) {
  const facts = [
    ["error", row.error, "relative difference from the partner in float64"],
    ["allowed", row.allowed, "how much of it rounding explains"],
    ["off", row.off, "how far the value is off its own float64 twin"],
  ];
  const known = facts.filter(([, number]) => number !== null);
  return [
    make("span", { class: `state ${row.state}` }, `${GLYPHS[row.state]} ${MEANINGS[row.state]}`),
    ...known.map(([name, number, title]) =>
      make("span", { title }, `${name} `, make("b", {}, shown(number)))),
  ];
}

function goTo(partner) {
  const button = make("button", { type: "button" }, `Show the partner on the ${partner.side}`);
  button.addEventListener("click", () => reveal(partner));
  return make("p", {}, button);
}
