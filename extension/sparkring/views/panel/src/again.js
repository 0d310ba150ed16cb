// Runs the cell that shows a panel again, in JupyterLab and Notebook 7.
//
// The page has no access to the application, so this uses what a user would: a click on the prompt selects only this
// cell, and the toolbar's button runs what is selected. Keys would do it, too, but users can change what they mean.

const RUN = '.jp-Toolbar [data-command="notebook:run-cell-and-select-next"]';
const SELECTED = ".jp-Notebook .jp-Cell:is(.jp-mod-active, .jp-mod-selected, .jp-mod-multiSelected)";
const SETTLED_MS = 100; // after this time, the application has marked the selected cell
const settled = () => new Promise((resolve) => setTimeout(resolve, SETTLED_MS));

// Return the parts of the notebook that are needed; null if there are none, or if the cell does not begin with `magic`,
// for example because it only shows a saved run.
function found(panel, magic) {
  const cell = panel.closest(".jp-CodeCell"), notebook = cell?.closest(".jp-NotebookPanel");
  const prompt = cell?.querySelector(".jp-InputPrompt"), button = notebook?.querySelector(RUN);
  const [word] = cell?.querySelector(".cm-line")?.textContent.split(/\s/, 1) ?? [];
  return magic && word === magic && prompt && button ? { cell, notebook, prompt, button } : null;
}

export function canRunAgain(panel, magic) {
  return found(panel, magic) !== null;
}

// Run the cell, and return whether that was possible. No other cell is run: if the application does not show that this
// cell alone is selected, nothing is.
export async function runAgain(panel, magic) {
  press(found(panel, magic)?.prompt);
  await settled();
  const { cell, notebook, prompt, button } = found(panel, magic) ?? {};
  const selected = [...(notebook?.querySelectorAll(SELECTED) ?? [])];
  if (selected.length !== 1 || selected[0] !== cell) return false;
  press(button);
  await settled(); // the toolbar's button has also selected the next cell, and has scrolled to it
  press(prompt);
  cell.scrollIntoView({ block: "nearest" });
  return true;
}

// Both react to the pressed button of the mouse, not to a click.
function press(element) {
  const { left, top, width, height } = element?.getBoundingClientRect() ?? {};
  const where = { bubbles: true, cancelable: true, view: window, button: 0, clientX: left + width / 2, clientY: top + height / 2 };
  for (const name of ["mousedown", "mouseup"]) element?.dispatchEvent(new MouseEvent(name, where));
}
