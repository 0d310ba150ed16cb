// Computes what the Search tab shows, from the rows of the items and from the last message of kind "search".

import { BLUE, EQUAL, FAR, RED, WHOLE } from "./constants.js";

const KEY_STEP = 0.05, LARGE_STEPS = 4; // an arrow key moves an end of a brush by one KEY_STEP, a page key by LARGE_STEPS

// Return the trials that have a value of the metric, except failed trials, in the order of their numbers.
export function trialsOf(rows, metric) {
  return [...rows].filter((row) => Number.isFinite(row.metrics[metric]) && row.state !== "failed")
    .map(({ item, state, metrics, parameters, curves }) => ({ item, state, value: metrics[metric], parameters,
      curve: curves[metric] ?? [], whole: WHOLE.includes(state) }))
    .sort((a, b) => a.item - b.item);
}

// Return the values of the trials that have finished; if none has, those of all trials.
export function finalValues(trials) {
  const whole = trials.filter((trial) => trial.whole);
  return (whole.length ? whole : trials).map(({ value }) => value);
}

// Return the lowest and the highest of the values. There may be too many values for the arguments of Math.min().
export function bounds(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) [low, high] = [Math.min(low, value), Math.max(high, value)];
  return [low, high];
}

// Return the lowest and the highest value that a chart shows. Values that are far worse than most values, such as the values of
// a trial that diverges, are outside the chart.
export function extent(values, mode) {
  const sorted = values.filter(Number.isFinite).sort((a, b) => a - b);
  if (!sorted.length) return [0, 1];
  let low = sorted[0], high = sorted[sorted.length - 1];
  const worse = sorted[Math.round((mode === "min" ? 0.75 : 0.25) * (sorted.length - 1))];
  if (mode === "min" && worse > low) high = Math.min(high, low + FAR * (worse - low));
  if (mode === "max" && worse < high) low = Math.max(low, high - FAR * (high - worse));
  const equal = high - low <= EQUAL * Math.max(Math.abs(low), Math.abs(high));
  return equal ? [low - 0.5, high + 0.5] : [low, high];
}

// Return the lowest and the highest value that a chart of curves shows. Whole curves are compared, since curves of which most values
// are near the best one may begin far from it. Only what is far outside the range of 95 % of the curves is outside the chart.
export function curvesExtent(curves) {
  const ends = curves.filter((curve) => curve.length).map(bounds), last = ends.length - 1;
  if (last < 0) return extent([], "");
  const [lows, highs] = [0, 1].map((end) => ends.map((both) => both[end]).sort((a, b) => a - b));
  const low = lows[Math.ceil(0.05 * last)], high = highs[Math.floor(0.95 * last)], far = high > low ? FAR * (high - low) : Infinity;
  return extent([Math.max(lows[0], low - far), Math.min(highs[last], high + far)], "");
}

// Return the best trial so far after each trial that has finished, as pairs of the trial's number and the best trial.
export function bests(trials, mode) {
  let best = null;
  return trials.filter(({ whole, value }) => whole && Number.isFinite(value)).map((trial) => {
    if (best === null || (mode === "min" ? trial.value < best.value : trial.value > best.value)) best = trial;
    return [trial.item, best];
  });
}

// Return the position of a value on the axis of a parameter, from 0 (the lower end) to 1; null if the value is not on the
// axis.
export function place({ low, high, log, choices }, value) {
  if (choices.length) {
    const at = choices.findIndex((choice) => choice === value || Number(choice) === value);
    return at < 0 ? null : choices.length === 1 ? 0.5 : at / (choices.length - 1);
  }
  if (typeof value !== "number") return null;
  if (low === high) return 0.5;
  return log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
}

// Return the value at a position on an axis. This is the inverse of place(). Between two choices, return the nearer choice.
export function valueAt({ low, high, log, choices }, at) {
  if (choices.length) return choices[Math.round(at * (choices.length - 1))];
  return log ? low * (high / low) ** at : low + at * (high - low);
}

// Return the new position of an end of a brush when a key is pressed. A key moves the end to the next choice, or by a part of
// the axis. The old position is `at`, and the new position is from `least` to `most`. Return null for other keys.
export function moved({ choices }, at, key, [least, most]) {
  const step = choices.length > 1 ? 1 / (choices.length - 1) : KEY_STEP;
  const steps = { ArrowUp: 1, ArrowRight: 1, ArrowDown: -1, ArrowLeft: -1, PageUp: LARGE_STEPS, PageDown: -LARGE_STEPS }[key];
  if (steps) return Math.min(most, Math.max(least, Math.round(at / step + steps) * step));
  return { Home: least, End: most }[key] ?? null;
}

// Return the colour of a value, from 0 (bad) to 1 (good).
export function scale(good) {
  const mixed = [1, 3, 5].map((at) => Math.round(parseInt(BLUE.slice(at, at + 2), 16) * good + parseInt(RED.slice(at, at + 2), 16) * (1 - good)));
  return `#${mixed.map((part) => part.toString(16).padStart(2, "0")).join("")}`;
}

// Return labels for an axis, as pairs of a position and the value at this position.
export function marks(axis) {
  const { low, high, log, choices } = axis;
  const values = choices.length ? choices : low === high ? [low]
    : log ? roundNumbers(Math.log10(low), Math.log10(high), 4).map((power) => 10 ** power) : roundNumbers(low, high, 4);
  return values.map((value) => [place(axis, value), value]);
}

// Return the trials that are within all brushes. `brushes` maps the number of an axis to the lower and upper end of its
// brush.
export function brushed(trials, axes, brushes) {
  const wanted = [...brushes];
  return trials.filter((trial) => wanted.every(([axis, [from, to]]) => {
    const at = axes[axis].at(trial);
    return at !== null && at >= from - 1e-9 && at <= to + 1e-9;
  }));
}

// Return round numbers between two values, for the labels of an axis. If the values are almost equal, adding a step may not
// change a number, so the numbers are also counted.
export function roundNumbers(low, high, most) {
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((digit) => digit * power >= rough);
  const found = [];
  for (let at = Math.ceil(low / step); found.length <= most && at * step <= high + step * 1e-9; at++) found.push(Number((at * step).toPrecision(12)));
  return found;
}
