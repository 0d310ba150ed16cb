// Turns numbers into text, as history/describe does. tests/views/words.json has test cases for both.

export function duration(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  if (whole < 60) return `${whole} s`;
  const two = (number) => String(number).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
}

// Return the time since the start of a run as it is shown beside pictures: 1:02, 1:01:02.
export function clock(seconds) {
  const whole = Math.max(0, Math.floor(seconds)), two = (number) => String(number).padStart(2, "0");
  const minutes = `${Math.floor(whole / 60) % 60}`;
  return whole < 3600 ? `${minutes}:${two(whole % 60)}` : `${Math.floor(whole / 3600)}:${minutes.padStart(2, "0")}:${two(whole % 60)}`;
}

// Return a metric's value as text. Values from 0.0001 to 10000 are rounded to four significant digits, and values up to
// a million to integers. Smaller and larger values have an exponent and three significant digits.
export function number(value) {
  const size = Math.abs(value);
  if (value === 0 || (size >= 1e-4 && size < 1e6)) return size < 1e4 ? String(Number(value.toPrecision(4))) : value.toFixed(0);
  const rounded = Number(value.toPrecision(3));
  if (Math.abs(rounded) === 1e-4) return String(rounded);
  return rounded.toExponential().replace(/e([+-])(\d)$/, "e$10$2");
}

// Return a completed fraction of the run as text. It is rounded down, so that 100 % means that nothing is left.
export function percent(fraction) {
  return `${Math.floor(100 * fraction + 1e-6)} %`;
}

// Return a number of bytes in decimal units, with three digits: 999 B, 1.20 kB, 34.5 MB.
export function size(bytes) {
  if (bytes < 1000) return `${bytes} B`;
  const units = ["kB", "MB", "GB", "TB"];
  let at = 0, value = bytes / 1000;
  while (value >= 999.5 && at < 3) {
    value /= 1000;
    at += 1;
  }
  return `${value.toFixed(value < 9.995 ? 2 : value < 99.95 ? 1 : 0)} ${units[at]}`;
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

// Return the time since the run began, such as "1:02.4".
export function elapsed(seconds) {
  const tenths = Math.max(0, Math.round(10 * seconds)), whole = Math.floor(tenths / 10);
  const two = (number) => String(number).padStart(2, "0");
  const hours = Math.floor(whole / 3600), minutes = Math.floor((whole % 3600) / 60);
  return `${hours ? `${hours}:${two(minutes)}` : minutes}:${two(whole % 60)}.${tenths % 10}`;
}

// Return the numbers of ranks as text of at most `most` characters: "0–3, 7" or, if that is too long, "87 ranks".
export function ranksWithin(ranks, most, noun) {
  const numbers = rankNumbers(ranks);
  return numbers.length > most ? `${ranks.length} ${noun}` : numbers;
}
