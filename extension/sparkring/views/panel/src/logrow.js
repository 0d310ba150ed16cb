// Makes the elements of a row of the Logs tab.

import { make, put } from "./elements.js";
import { RANK_COLOURS } from "./constants.js";
import { elapsed, rankNumbers, ranksWithin } from "./words.js";

const STREAMS = { o: ["stdout", "│"], e: ["stderr", "┆"], m: ["message", "»"], g: ["", "…"] };

// Return a row with one line. The row begins with a tag. If the row shows the time of the line, `began` is the time at which
// the run began, in Unix seconds.
export function lineRow(line, query, began = null) {
  return make("div", { class: `sr-row sr-${line.stream}`, "data-line": line.number }, clock(line, began),
    make("span", { class: "sr-tag" }), ...said(line, query));
}

// Return a row with lines side by side. `lines` has null for a column without a line.
export function columnsRow(lines, query, began = null) {
  const known = lines.filter(Boolean), isGap = known.length === 1 && known[0].rank < 0;
  const time = Math.min(...known.map((line) => line.time ?? Infinity));
  const part = (line) => make("div", { class: `sr-part sr-${line.stream}`, "data-line": line.number,
    title: line.text.length > 20 && line.text }, ...said(line, query));
  return make("div", { class: "sr-row sr-inrow" }, clock({ ...known[0], time }, began),
    ...(isGap ? known : lines).map((line) => (line ? part(line) : make("div", { class: "sr-part" }))));
}

// Write ranks before a line, in at most `most` characters. The line may already be shown, because more ranks may print
// the same line later. Each line has the colour of the lowest of its ranks.
export function tag(row, ranks, most, noun) {
  if (row.tagged === ranks.length) return;
  row.tagged = ranks.length;
  const element = row.querySelector(".sr-tag"), every = rankNumbers(ranks), short = ranksWithin(ranks, most, noun(ranks.length));
  const colour = ranks.length ? Math.min(...ranks) % RANK_COLOURS.length : -1;
  element.className = ranks.length ? `sr-tag sr-c${colour}` : "sr-tag";
  row.style.setProperty("--sr-c", RANK_COLOURS[colour] ?? "transparent");
  put(element, short);
  element.title = ranks.length ? `${noun(ranks.length)} ${every}` : "";
  if (short !== every) { // only elements with a role may have a label
    element.setAttribute("role", "img");
    element.setAttribute("aria-label", element.title);
  }
}

function clock({ time, rank }, began) {
  if (began === null) return "";
  if (!Number.isFinite(time) || rank < 0) return make("span", { class: "sr-clock" });
  return make("span", { class: "sr-clock", title: new Date(1000 * (began + time)).toLocaleTimeString() }, elapsed(time));
}

function said({ stream, text, html }, query) {
  const [name, sign] = STREAMS[stream], element = make("span", { class: "sr-said" });
  if (query && text.toLowerCase().includes(query.toLowerCase())) highlight(element, text, query);
  else if (html != null) element.innerHTML = html; // made and escaped by views/markup.py
  else element.textContent = text;
  return [make("span", { class: "sr-sign", title: name }, sign), element];
}

function highlight(element, text, query) {
  const lower = text.toLowerCase(), wanted = query.toLowerCase();
  let from = 0;
  for (let at; (at = lower.indexOf(wanted, from)) >= 0; from = at + wanted.length) {
    element.append(text.slice(from, at), make("mark", {}, text.slice(at, at + wanted.length)));
  }
  element.append(text.slice(from));
}
