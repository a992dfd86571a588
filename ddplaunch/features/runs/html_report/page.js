// Searches the output of ranks, and reloads a page that is served. It inserts text only as text; nodes come from the
// reloaded page, in which a browser runs no other script (see content_security_policy).
let blocks = [];
const all = (words) => [...document.querySelectorAll(words)];
const name = (block) => block.closest("section").id + block.querySelector("summary").firstChild.textContent;

function gather() {
  blocks = all("#output details:not(#others)").map((block) => {
    const pre = block.querySelector("pre");
    return { block, pre, count: block.querySelector("i"), open: block.open, lines: pre.textContent.split("\n") };
  });
  const search = document.getElementById("search");
  if (search) {
    search.hidden = false;
    search.oninput = () => find(search.value.toLowerCase());
    if (search.value) search.oninput();
  }
}

function find(word) {
  const others = document.getElementById("others");
  if (others) others.open = Boolean(word);
  for (const { block, pre, count, open, lines } of blocks) {
    const found = word ? lines.filter((line) => line.toLowerCase().includes(word)) : lines;
    block.hidden = word && !found.length;
    block.open = word ? true : open;
    count.textContent = word ? ` ${found.length} found` : "";
    pre.replaceChildren(found.join("\n"));
  }
}

async function replaced() {
  const answer = await fetch(location.href);
  if (!answer.ok) return true;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  const open = new Map(all("details").map((block) => [name(block), block.open]));
  const search = document.getElementById("search"), typing = document.activeElement === search;
  for (const block of fresh.querySelectorAll("details")) {
    if (open.has(name(block))) block.open = open.get(name(block));
  }
  if (search) fresh.getElementById("search")?.replaceWith(search);
  for (const part of ["header", "main", "footer"]) {
    document.querySelector(part).replaceWith(fresh.querySelector(part));
  }
  if (typing) search.focus();
  gather();
  return fresh.documentElement.dataset.renewed;
}

async function renew() {
  let more = true;
  try {
    if (getSelection().type !== "Range") more = await replaced();
  } catch {
    // no answer: try again later
  }
  if (more) wait();
}

const wait = () => setTimeout(renew, 1000 * document.documentElement.dataset.renewed);
gather();
if (document.documentElement.dataset.renewed) wait();
