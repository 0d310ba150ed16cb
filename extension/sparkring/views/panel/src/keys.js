// Handles keys that are typed in a panel.

// The notebook still gets these keys, which run the cell, save, search, and list all commands.
const NOTEBOOKS_KEYS = new Set(["Shift enter", "Ctrl enter", "Ctrl s", "Ctrl f", "Ctrl Shift c"]);

// Keys typed in a panel must not reach the notebook, where D D would delete the running cell. JupyterLab ignores keys
// of an element that has the attribute below. But JupyterLab looks at the focused element before the elements around it, so
// it would find a shortcut for the focused element before it saw an attribute of the panel. Therefore, the focused element
// itself gets the attribute, just before the key reaches JupyterLab's listener on the document. When the next key is typed,
// the attribute is removed from this element, since an element of the notebook inside it may then have the focus.
let kept = null;

function keepKeys(event) {
  kept?.removeAttribute("data-lm-suppress-shortcuts");
  kept = event.target.closest?.(".sr-run") ? event.target : null;
  if (!NOTEBOOKS_KEYS.has(keyName(event))) kept?.setAttribute("data-lm-suppress-shortcuts", "");
}

// VS Code listens on the window and has no such attribute. Therefore, this listener on the document stops keys before VS Code
// gets them. NOTEBOOKS_KEYS still reach VS Code. So do function keys, and keys with Ctrl or Cmd, because the whole
// application uses them, for example to copy or to show the terminal.
function stopKeys(event) {
  if (event.ctrlKey || event.metaKey || /^F\d/.test(event.key) || NOTEBOOKS_KEYS.has(keyName(event))) return;
  if (event.target.closest?.(".sr-run")) event.stopPropagation();
}

// Handle the keys typed in panels, until the returned function is called. A browser adds a function as a listener only once, so
// each call has functions of its own: if the panels of one kernel are closed, those of the others must still be guarded.
export function guardKeys() {
  const keep = (event) => keepKeys(event), stop = (event) => stopKeys(event);
  window.addEventListener("keydown", keep, { capture: true });
  document.addEventListener("keydown", stop);
  return () => {
    window.removeEventListener("keydown", keep, { capture: true });
    document.removeEventListener("keydown", stop);
  };
}

function keyName(event) {
  return [(event.ctrlKey || event.metaKey) && "Ctrl", event.altKey && "Alt", event.shiftKey && "Shift", event.key.toLowerCase()]
    .filter(Boolean).join(" ");
}
