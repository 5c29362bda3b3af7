// Asks the server that gave this page for the state of the run, and shows it. Nothing else is ever asked for.
"use strict";
const main = document.querySelector("main");
const link = document.querySelector("#link");
const PAUSE = 2000;

async function look() {
  try {
    const answer = await fetch("now", { cache: "no-store", credentials: "omit", redirect: "error" });
    if (!answer.ok) throw new Error(`it answered ${answer.status}`);
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    const open = [...main.querySelectorAll("details[open]")].map((each) => each.id);
    const aside = [...main.querySelectorAll(".scroll")].map((each) => each.scrollLeft);
    main.replaceChildren(...fresh.body.childNodes);
    for (const id of open) main.querySelector(`#${CSS.escape(id)}`)?.setAttribute("open", "");
    main.querySelectorAll(".scroll").forEach((each, at) => { each.scrollLeft = aside[at] ?? 0; });
    name();
    link.textContent = "";
  } catch (error) {
    link.textContent = "fedbilevel watch does not answer any more. This is what it said last.";
  }
  setTimeout(look, PAUSE);
}

function name() {
  const title = main.querySelector("header")?.dataset.title;
  if (title) document.title = title;
}

name();
setTimeout(look, PAUSE);
