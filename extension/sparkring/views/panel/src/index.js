// The entry point of the panel's script, which runs in the page. Each kernel has one widget, and the widget loads this script.

import "uplot/dist/uPlot.min.css";
import "../../style.css";
import "./panel.css";
import { make } from "./elements.js";
import { Runs } from "./runs.js";

export default {
  initialize({ model }) {
    const known = (window.sparkringPages ??= new Map()), page = model.get("page");
    if (known.get(page)?.closed === false) known.get(page).listen(model);
    else known.set(page, new Runs(model));
    const runs = known.get(page);
    return () => { if (runs.model === model) runs.close(); };
  },
  // Some front ends load a widget's script only if a view of it is displayed. This view is empty, unless the
  // front end isolates the outputs of cells: each run then has its own widget, and the widget's view is the run's panel.
  render({ model, el }) {
    const runs = window.sparkringPages?.get(model.get("page")), run = model.get("run");
    if (!run || !runs) return undefined;
    const place = make("div", { class: "sr-place" });
    el.append(place);
    runs.show(run, place);
    return () => runs.hide(run, place);
  },
};
