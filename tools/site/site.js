// The theme makes these boxes by script, after the page: what can be scrolled can be reached by the keyboard, and what
// is told to a screen reader twice has two names.
function named() {
  document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code").forEach((box) => {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  });
  document.querySelectorAll(".md-code__nav").forEach((nav, at) => {
    nav.setAttribute("aria-label", `Code ${at + 1}`);
  });
}
new MutationObserver(named).observe(document.body, { childList: true, subtree: true });
addEventListener("resize", named);
named();
