// Made by views/page_constants.py.
export const BLUE = "#2f80d0";
export const GREEN = "#23935a";
export const RED = "#dd4a45";
export const AMBER = "#b97a10";
export const RANK_COLOURS = ["#2f80d0", "#23935a", "#b97a10", "#9262d6", "#d0528f", "#16908f", "#7d8a1e", "#cf6a32"];
export const RIGHT = ["count", "number", "numbers", "duration", "whole"];
export const ITEM_COLUMNS = [{"name": "item", "title": "#", "kind": "count", "width": 48}, {"name": "name", "title": "item", "width": 140, "share": 1.5}, {"name": "state", "title": "state", "kind": "state", "width": 84, "signs": {"running": "▶", "finished": "✓", "failed": "✗", "stopped": "■", "kept": "✓", "pruned": "✂"}}, {"name": "attempt", "title": "attempt", "kind": "count", "needs": 1, "width": 56}, {"name": "place", "title": "host", "needs": 2, "width": 100}, {"name": "took", "title": "time", "kind": "duration", "width": 72}, {"name": "metrics", "kind": "numbers", "width": 80}, {"name": "value", "title": "value", "needs": 1, "width": 80, "share": 1, "most": 60}, {"name": "error", "title": "error", "needs": 1, "width": 180, "share": 2, "most": 160}];
export const ITEM_DETAILS = ["began", "advice", "parameters", "by", "curves"];
export const BATCH_COLUMNS = [{"name": "batch", "title": "batch", "kind": "count", "width": 80}, {"name": "rows", "title": "rows", "kind": "count", "width": 80}, {"name": "how", "title": "result", "width": 80}, {"name": "moving", "title": "moving", "kind": "duration", "width": 80}, {"name": "reading", "title": "reading", "kind": "duration", "width": 80}, {"name": "training", "title": "training", "kind": "duration", "width": 80}, {"name": "saving", "title": "saving", "kind": "duration", "width": 80}, {"name": "waiting", "title": "waiting", "kind": "duration", "width": 80}, {"name": "together", "title": "together", "kind": "duration", "width": 80}, {"name": "saved", "title": "saved", "kind": "check", "needs": 1, "width": 80}, {"name": "backlog", "title": "backlog", "kind": "count", "needs": 1, "width": 80}, {"name": "after", "title": "after", "kind": "whole", "width": 80}];
export const BATCH_PARTS = {"moving": "#2f80d0", "reading": "#9262d6", "training": "#23935a", "saving": "#b97a10", "waiting": "#9aa0a6"};
export const BATCH_TITLE = "seconds per batch";
export const BATCH_SLOTS = 30;
