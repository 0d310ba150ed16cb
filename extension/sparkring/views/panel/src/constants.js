// Made by views/page_constants.py.
export const BLUE = "#2f80d0";
export const GREEN = "#23935a";
export const RED = "#dd4a45";
export const AMBER = "#b97a10";
export const RANK_COLOURS = ["#2f80d0", "#23935a", "#b97a10", "#9262d6", "#d0528f", "#16908f", "#7d8a1e", "#cf6a32"];
export const RIGHT = ["count", "number", "numbers", "duration", "whole"];
export const BATCH_COLUMNS = [{"name": "batch", "title": "batch", "kind": "count"}, {"name": "rows", "title": "rows", "kind": "count"}, {"name": "how", "title": "result"}, {"name": "moving", "title": "moving", "kind": "duration"}, {"name": "reading", "title": "reading", "kind": "duration"}, {"name": "training", "title": "training", "kind": "duration"}, {"name": "saving", "title": "saving", "kind": "duration"}, {"name": "waiting", "title": "waiting", "kind": "duration"}, {"name": "together", "title": "together", "kind": "duration"}, {"name": "saved", "title": "saved", "kind": "check", "needs": 1}, {"name": "backlog", "title": "backlog", "kind": "count", "needs": 1}, {"name": "after", "title": "after", "kind": "whole"}];
export const BATCH_PARTS = {"moving": "#2f80d0", "reading": "#9262d6", "training": "#23935a", "saving": "#b97a10", "waiting": "#9aa0a6"};
export const BATCH_TITLE = "seconds per batch";
export const BATCH_SLOTS = 30;
