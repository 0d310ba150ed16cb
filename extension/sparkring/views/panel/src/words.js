// Turns numbers into text, as history/describe/text.py does. tests/views/words.json has test cases for both.

const two = (number) => String(number).padStart(2, "0");

// Return a number as `write` does, but round a tie to the even digit, as Python does and browsers do not. `digits` is the number
// of decimals in the text; if it is negative, digits before the point are rounded, too.
function even(value, digits, write) {
  const size = Math.abs(value), unit = 10 ** Math.max(0, -digits);
  const isTie = digits < 0 ? size % unit === unit / 2 : (size * 2 ** (digits + 1)) % 2 === 1;
  if (!isTie) return write(value);
  return [1 - Number.EPSILON, 1 + Number.EPSILON].map((factor) => write(value * factor)).find((text) => /^[^e]*[02468](e|$)/.test(text));
}

// Return a number with so many decimals, as Python's format(value, ".2f") does.
function fixed(value, decimals) {
  return even(value, decimals, (each) => each.toFixed(decimals));
}

// Return a number with so many significant digits, as Python's format(value, ".4g") does.
function significant(value, digits) {
  const power = Number(value.toExponential(digits - 1).split("e")[1]);
  const [mantissa, exponent] = even(value, digits - 1 - power, (each) => each.toExponential(digits - 1)).split("e");
  if (exponent >= -4 && exponent < digits) return String(Number(`${mantissa}e${exponent}`));
  return `${mantissa.replace(/\.?0+$/, "")}e${exponent.replace(/^(.)(\d)$/, "$10$2")}`;
}

// Return a span of time: 40 ms, 3.2 s, 3 min 12 s, 2 h 05 min.
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "";
  if (seconds > 0 && seconds < 9.95) {
    if (seconds < 0.001) return "< 1 ms";
    return seconds < 0.0995 ? `${fixed(seconds * 1000, 0)} ms` : `${fixed(seconds, 1)} s`;
  }
  return ticking(Number(fixed(seconds, 0)));
}

// Return a span of time without fractions of a second, such as 3 s. Texts that tick use this.
export function ticking(seconds) {
  const all = Math.max(0, Math.floor(seconds));
  if (all < 60) return `${all} s`;
  if (all < 3600) return `${Math.floor(all / 60)} min ${two(all % 60)} s`;
  return `${Math.floor(all / 3600)} h ${two(Math.floor((all % 3600) / 60))} min`;
}

// Say how long ago something was.
export function ago(seconds) {
  if (!Number.isFinite(seconds)) return "";
  if (seconds < 1) return "just now";
  const [, unit, name] = [[60, 1, "s"], [3600, 60, "min"], [48 * 3600, 3600, "h"], [Infinity, 86400, "days"]].find(([end]) => seconds < end);
  return `${count(Math.floor(seconds / unit))} ${name} ago`;
}

// Return the time since the start of a run as it is shown beside pictures: 1:02, 1:01:02.
export function clock(seconds) {
  const whole = Math.max(0, Math.floor(seconds)), minutes = Math.floor(whole / 60), hours = Math.floor(minutes / 60);
  return `${hours ? `${hours}:${two(minutes % 60)}` : minutes}:${two(whole % 60)}`;
}

// Return the same time with tenths of a second, such as 1:02.4.
export function elapsed(seconds) {
  const tenths = Math.max(0, Math.round(10 * seconds));
  return `${clock(Math.floor(tenths / 10))}.${tenths % 10}`;
}

// Return a metric's value with at most four significant digits.
export function number(value) {
  const size = Math.abs(value);
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "nan" : value > 0 ? "inf" : "-inf";
  if (value === 0) return "0";
  if (size < 1e-4 || size >= 1e6) return significant(value, 3);
  return size < 999.95 ? significant(value, 4) : count(Number(fixed(value, 0)));
}

// Return the function that writes the numbers in a column: number(), or one that writes four decimals.
export function numbers(values) {
  const isPlain = values.every((value) => value === 0 || (Math.abs(value) >= 1e-3 && Math.abs(value) < 100));
  return isPlain && !values.every(Number.isInteger) ? (value) => fixed(value, 4) : number;
}

// Return a completed fraction of the run as text. It is rounded down, so that 100 % means that nothing is left.
export function percent(fraction) {
  return Number.isFinite(fraction) ? `${Math.floor(100 * fraction + 1e-6)} %` : "";
}

// Return a number of bytes in decimal units, with three digits: 999 B, 1.20 kB, 34.5 MB; "" if it is not known.
export function size(bytes) {
  if (bytes == null || !Number.isFinite(bytes)) return "";
  if (bytes < 999.5) return `${fixed(bytes, 0)} B`;
  const units = ["kB", "MB", "GB", "TB"];
  let at = 0, value = bytes / 1000;
  while (value >= 999.5 && at < 3) {
    value /= 1000;
    at += 1;
  }
  return `${fixed(value, value < 9.995 ? 2 : value < 99.95 ? 1 : 0)} ${units[at]}`;
}

export function count(value) {
  return value.toLocaleString("en");
}

// Return a count with its noun: 1 line, 4,812 lines, 12 batches.
export function counted(value, noun) {
  return `${count(value)} ${value === 1 ? noun : plural(noun)}`;
}

export function plural(noun) {
  return `${noun}${/(tch|s)$/.test(noun) ? "es" : "s"}`;
}

// Return the numbers of ranks as text, such as "0–3, 7". Three or more consecutive numbers become a range.
export function rankNumbers(ranks) {
  const spans = [];
  for (const rank of [...new Set(ranks)].sort((a, b) => a - b)) {
    const last = spans[spans.length - 1];
    if (last && last[1] === rank - 1) last[1] = rank;
    else spans.push([rank, rank]);
  }
  return spans.map(([a, b]) => (b - a > 1 ? `${a}–${b}` : b > a ? `${a}, ${b}` : `${a}`)).join(", ");
}

// Return the ranks with a noun: "rank 2" or "ranks 0–3, 7".
export function rankList(ranks) {
  return `${ranks.length === 1 ? "rank" : "ranks"} ${rankNumbers(ranks)}`;
}

// Return the numbers of ranks as text of at most `most` characters: "0–3, 7" or, if that is too long, "87 ranks".
export function ranksWithin(ranks, most, noun) {
  const numbers = rankNumbers(ranks);
  return numbers.length > most ? `${ranks.length} ${noun}` : numbers;
}

// Return the function that writes the cells of a column as text, as description.column_texts() does. `cells` are all cells of the column.
export function writer({ kind, signs, noun }, cells) {
  const write = { count, duration, number: kind === "number" && numbers(cells), whole: ticking, percent, counted: (cell) => counted(cell, noun),
                  state: (state) => `${signs[state]} ${state}`, check: (cell) => (cell ? "✓" : "") }[kind] ?? String;
  return (cell) => (cell == null ? "" : typeof cell === "string" && kind === "number" ? cell : write(cell));
}

// Return one cell in words, for places without a table, as description.fact() does.
export function fact(column, cell, noun = "step") {
  const written = cell == null ? "" : writer(column, [])(cell);
  return written && column.title.replace("{noun}", noun).replace("{nouns}", plural(noun)).replace("{}", () => written);
}
