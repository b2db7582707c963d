// Conversations, kept with their files in this browser's IndexedDB. Where a browser refuses it, nothing is kept.

const STORE = "conversations";

function open() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open("sensorium", 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

async function run(mode, work) {
  const database = await open();
  try {
    return await new Promise((resolve, reject) => {
      const transaction = database.transaction(STORE, mode);
      const request = work(transaction.objectStore(STORE));
      transaction.oncomplete = () => resolve(request.result);
      transaction.onerror = transaction.onabort = () => reject(transaction.error);
    });
  } finally {
    database.close();
  }
}

/** Keep a conversation: {id, time, title, entries}. */
export const keep = (conversation) => run("readwrite", (store) => store.put(conversation)).catch(console.warn);
export const remove = (id) => run("readwrite", (store) => store.delete(id)).catch(console.warn);
export const removeAll = () => run("readwrite", (store) => store.clear()).catch(console.warn);

/** Return all conversations, the newest first. */
export async function all() {
  const found = await run("readonly", (store) => store.getAll()).catch(() => []);
  return found.sort((a, b) => b.time - a.time);
}
