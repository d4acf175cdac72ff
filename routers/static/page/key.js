// The API key. It stays in this tab: sessionStorage ends with it, and no other tab reads it.

const NAME = "trellis-key";

export function getKey() {
  return sessionStorage.getItem(NAME) || "";
}

export function setKey(key) {
  if (key) sessionStorage.setItem(NAME, key);
  else sessionStorage.removeItem(NAME);
}
