// Runs the cell with a panel again, in JupyterLab and Notebook 7.
//
// The page has no access to the application, so this module does what a user would do: a click on the prompt selects only
// this cell, and the toolbar's run button runs the selected cell. Keys are not used, because users can redefine them.

const RUN = '.jp-Toolbar [data-command="notebook:run-cell-and-select-next"]';
const SELECTED = ".jp-Notebook .jp-Cell:is(.jp-mod-active, .jp-mod-selected, .jp-mod-multiSelected)";
const SETTLED_MS = 100; // within this time, the application marks the selected cell
const settled = () => new Promise((resolve) => setTimeout(resolve, SETTLED_MS));

// Return the elements of the notebook that are needed. Return null if an element is missing, or if the cell does not begin
// with `magic`, for example because the cell only shows a saved run.
function found(panel, magic) {
  const cell = panel.closest(".jp-CodeCell"), notebook = cell?.closest(".jp-NotebookPanel");
  const prompt = cell?.querySelector(".jp-InputPrompt"), button = notebook?.querySelector(RUN);
  const [word] = cell?.querySelector(".cm-line")?.textContent.split(/\s/, 1) ?? [];
  return magic && word === magic && prompt && button ? { cell, notebook, prompt, button } : null;
}

export function canRunAgain(panel, magic) {
  return found(panel, magic) !== null;
}

// Run the cell, and return whether this was possible. If the application does not show that only this cell is selected,
// run nothing, so that no other cell is run.
export async function runAgain(panel, magic) {
  press(found(panel, magic)?.prompt);
  await settled();
  const { cell, notebook, prompt, button } = found(panel, magic) ?? {};
  const selected = [...(notebook?.querySelectorAll(SELECTED) ?? [])];
  if (selected.length !== 1 || selected[0] !== cell) return false;
  press(button);
  await settled(); // the toolbar's button also selects the next cell and scrolls to it
  press(prompt);
  cell.scrollIntoView({ block: "nearest" });
  return true;
}

// Press the mouse button on an element. The prompt and the toolbar react to this, not to a click.
function press(element) {
  const { left, top, width, height } = element?.getBoundingClientRect() ?? {};
  const where = { bubbles: true, cancelable: true, view: window, button: 0, clientX: left + width / 2, clientY: top + height / 2 };
  for (const name of ["mousedown", "mouseup"]) element?.dispatchEvent(new MouseEvent(name, where));
}
