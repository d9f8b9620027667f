"use strict";
// Serves the page on a host offline after the first visit. All files are fetched together under the hash of
// their contents, so that a page never mixes two versions. Older versions are deleted once no page uses them.
const NAME = "gpt2-@@version@@";
const FILES = @@files@@;

self.addEventListener("install", event => event.waitUntil(
  caches.open(NAME).then(cache => cache.addAll(FILES.map(file => new Request(file, { cache: "no-cache" }))))));

self.addEventListener("activate", event => event.waitUntil((async () => {
  const old = (await caches.keys()).filter(name => name.startsWith("gpt2-") && name !== NAME);
  await Promise.all(old.map(name => caches.delete(name)));
  await self.clients.claim();
})()));

self.addEventListener("fetch", event => {
  if (event.request.method !== "GET") return;
  const wanted = event.request.mode === "navigate" ? "./" : event.request;
  event.respondWith((async () => await (await caches.open(NAME)).match(wanted, { ignoreSearch: true }) ?? fetch(event.request))());
});
