// Keys that are typed in a panel.

// Keys that the notebook still gets: run the cell, save, search, list all commands.
const NOTEBOOKS_KEYS = new Set(["Shift enter", "Ctrl enter", "Ctrl s", "Ctrl f", "Ctrl Shift c"]);

// Keys typed in a panel must not reach the notebook, where D D would delete the running cell. JupyterLab ignores keys
// of an element that has the attribute below. But JupyterLab looks at the focused element before the elements around it:
// it would find a shortcut for the focused element before it saw an attribute of the panel. Therefore the focused element
// itself gets the attribute, just before the key reaches JupyterLab's listener on the document. At the next key, the
// attribute is removed from this element, since an element of the notebook inside it may have the focus by then.
let kept = null;

export function keepKeys(event) {
  kept?.removeAttribute("data-lm-suppress-shortcuts");
  kept = event.target.closest?.(".sr-run") ? event.target : null;
  if (!NOTEBOOKS_KEYS.has(keyName(event))) kept?.setAttribute("data-lm-suppress-shortcuts", "");
}

// VS Code listens on the window and has no such attribute, so this listener on the document stops keys before VS Code
// gets them. It lets NOTEBOOKS_KEYS pass. It also lets function keys pass, and keys with Ctrl or Cmd, because the whole
// application uses them, for example to copy or to show the terminal.
export function stopKeys(event) {
  if (event.ctrlKey || event.metaKey || /^F\d/.test(event.key) || NOTEBOOKS_KEYS.has(keyName(event))) return;
  if (event.target.closest?.(".sr-run")) event.stopPropagation();
}

function keyName(event) {
  return [(event.ctrlKey || event.metaKey) && "Ctrl", event.altKey && "Alt", event.shiftKey && "Shift", event.key.toLowerCase()]
    .filter(Boolean).join(" ");
}
