// Tells users who look at another page that a run has ended: in the title of the browser tab and, on request, with a
// notification of the browser.

let restore = null; // restores the tab's own title

const said = (state) => `${state.title}: ${state.state}`;

// Return whether the user can still be asked to allow notifications. Browsers ask only after a click.
export function mayAsk(state) {
  return Boolean(state.notify) && !state.ended && globalThis.Notification?.permission === "default";
}

export function ask() {
  return Notification.requestPermission();
}

// Report that the run has ended, unless the user is looking at the page.
export function tellEnd(state) {
  if (!document.hidden) return;
  restore?.();
  const own = document.title, changed = `${said(state)} – ${own}`;
  const seen = () => { if (!document.hidden) restore?.(); };
  restore = () => {
    if (document.title === changed) document.title = own;
    document.removeEventListener("visibilitychange", seen);
    restore = null;
  };
  document.title = changed;
  document.addEventListener("visibilitychange", seen);
  if (state.notify && globalThis.Notification?.permission === "granted") {
    new Notification(said(state), { body: [state.took, ...state.last].filter(Boolean).join(" · ") });
  }
}
