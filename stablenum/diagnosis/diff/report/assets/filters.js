// The filters of the list.

const filters = {
  form: document.getElementById("filters"),
  text: document.getElementById("filter-text"),
  count: document.getElementById("count"),
  searching: false, // whether modules are open because of what is looked for in them

  chosen(name) {
    return new Set([...this.form.querySelectorAll(`[name=${name}]:checked`)].map((box) => box.value));
  },

  clear() {
    this.form.reset();
    this.apply();
  },

  apply() {
    const wanted = {
      text: this.text.value.trim().toLowerCase(),
      state: this.chosen("state"),
      phase: this.chosen("phase"),
    };
    let number = 0;
    for (const line of lines) {
      const fitting = SIDES.filter((side) => line[side] && fits(line[side], wanted));
      line.matches = fitting.length > 0;
      number += fitting.length;
    }
    this.searching = Boolean(wanted.text || wanted.state.size);
    eachNode(root, (node) => (node.closedByUser = false));
    const all = rows.left.length + rows.right.length;
    this.count.textContent = `${number === all ? "" : `${counted(number)} of `}${counted(all)} operations`;
  },
};

function fits(row, { text, state, phase }) {
  return (
    (!state.size || state.has(row.state)) &&
    (!phase.size || phase.has(row.phase)) &&
    (!text || textOf(row).includes(text))
  );
}

function textOf(row) {
  row.text ??= `${row.operation}\n${row.module}\n${row.where}\n${row.code}`.toLowerCase();
  return row.text;
}

function refilter() {
  filters.apply();
  tree.scrollTop = 0;
  flatten();
}

function startFilters() {
  filters.form.addEventListener("input", refilter);
  filters.form.addEventListener("submit", (event) => event.preventDefault());
  document.getElementById("unfold").addEventListener("click", () => foldAll(true));
  document.getElementById("fold").addEventListener("click", () => foldAll(false));
  document.getElementById("show-first")?.addEventListener("click", () => reveal(first.left ?? first.right));
  filters.apply();
}
