// The keys of the list of operations.

const KEYS = {
  ArrowDown: (item) => focusOn(visible[item.position + 1]),
  ArrowUp: (item) => focusOn(visible[item.position - 1]),
  PageDown: (item) => focusOn(visible[Math.min(item.position + page(), visible.length - 1)]),
  PageUp: (item) => focusOn(visible[Math.max(item.position - page(), 0)]),
  Home: () => focusOn(visible[0]),
  End: () => focusOn(visible.at(-1)),
  ArrowRight: right,
  ArrowLeft: left,
  Enter: act,
  " ": act,
};

function page() {
  return Math.max(1, Math.floor(tree.clientHeight / rowHeight) - 2);
}

function right(item) {
  if (!(item instanceof Node)) moveTo(item, "right");
  else if (isOpen(item)) focusOn(visible[item.position + 1]);
  else toggle(item);
}

function left(item) {
  if (item instanceof Node) {
    if (isOpen(item)) toggle(item);
    else if (item.level > 1) focusOn(item.parent);
  } else if (side === "right" && item.left) moveTo(item, "left");
  else focusOn(item.parent);
}

function moveTo(line, to) {
  if (!line[to]) return;
  side = to;
  focusOn(line);
}

function act(item) {
  if (item instanceof Node) toggle(item);
  else {
    const partner = partnerOf(item[side] ?? item[other(side)]);
    if (partner) reveal(partner);
  }
}

function onKey(event) {
  const key = KEYS[event.key];
  if (!key || !active || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  key(active);
}
