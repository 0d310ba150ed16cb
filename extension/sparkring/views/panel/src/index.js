// The entry point of the panel's script, which runs in the page. Each kernel has one widget, which loads this script.

import "uplot/dist/uPlot.min.css";
import "../../style.css";
import "./panel.css";
import { Runs } from "./runs.js";

export default {
  initialize({ model }) {
    const known = (window.sparkringPages ??= new Map()), page = model.get("page");
    if (known.get(page)?.closed === false) known.get(page).listen(model);
    else known.set(page, new Runs(model));
    const runs = known.get(page);
    return () => { if (runs.model === model) runs.close(); };
  },
  render() {}, // some front ends load a widget's script only if a view of it is displayed; this view is empty
};
