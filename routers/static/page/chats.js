// A chat is a tree of messages. Editing a message or regenerating an answer adds a branch; nothing is overwritten.
//
// chat    {id, title, updated, nodes: {id: node}, active: {parent id: child id}}; the parent of the first is "root"
// node    {id, parent, group, role: "user" | "assistant" | "tool", text, images, version}
// answer  an assistant's node has also: lane, exchange, index, state, error, times, usage, finish, tokens, reasoning,
//         calls (run.js)
// results a tool's node has instead of text: results [{id, name, text}], one for each complete call of its parent
//
// Nodes that came about together have the same `group`: answers side by side. Branches are groups.

export function newId() {
  // Not crypto.randomUUID(), which browsers keep from pages without TLS.
  return Array.from(crypto.getRandomValues(new Uint32Array(3)), (part) => part.toString(36)).join("");
}

export function newChat() {
  return { id: newId(), title: "New chat", updated: Date.now(), nodes: {}, active: {} };
}

export function addNode(chat, parent, fields) {
  const node = { id: newId(), parent, group: newId(), text: "", images: [], version: 0, ...fields };
  chat.nodes[node.id] = node;
  chat.active[parent] = node.id;
  return node;
}

// Marks a node as changed, so that it is drawn anew.
export function touch(node) {
  node.version += 1;
}

// The messages from the first to the last of the branch that is shown.
export function shownPath(chat) {
  const path = [];
  for (let id = chat.active.root; id; id = chat.active[id]) path.push(chat.nodes[id]);
  return path;
}

// The messages that lead to a node, with it.
export function pathTo(chat, node) {
  const path = [];
  for (let at = node; at; at = chat.nodes[at.parent]) path.unshift(at);
  return path;
}

// The branches at a node: lists of nodes with the same parent, by group, oldest first.
export function branches(chat, node) {
  const groups = new Map();
  for (const other of Object.values(chat.nodes)) {
    if (other.parent !== node.parent) continue;
    if (!groups.has(other.group)) groups.set(other.group, []);
    groups.get(other.group).push(other);
  }
  return [...groups.values()];
}

// The nodes side by side with a node, itself included.
export function besides(chat, node) {
  return branches(chat, node).find((group) => group.includes(node));
}

export function choose(chat, node) {
  chat.active[node.parent] = node.id;
}

// Shows the next branch at a node (step 1) or the one before (step -1).
export function stepBranch(chat, node, step) {
  const groups = branches(chat, node);
  const at = groups.findIndex((group) => group.includes(node)) + step;
  if (groups[at]) choose(chat, groups[at][0]);
}
