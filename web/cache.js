// @ts-check
// Models stored in the browser's IndexedDB: their files, keyed by the name of their source.

/** @typedef {{ name: string, bytes: number, source: import("./types").Source }} Kept */

/** @returns {Promise<IDBDatabase>} */
const opened = () => new Promise((resolve, reject) => {
  const request = indexedDB.open("gpt2", 1);
  request.onupgradeneeded = () => request.result.createObjectStore("models", { keyPath: "name" });
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

/**
 * Runs one request against the store.
 * @template T
 * @param {IDBTransactionMode} mode
 * @param {(store: IDBObjectStore) => IDBRequest<T>} ask
 * @returns {Promise<T>}
 */
async function asked(mode, ask) {
  const database = await opened();
  try {
    return await new Promise((resolve, reject) => {
      const transaction = database.transaction("models", mode), request = ask(transaction.objectStore("models"));
      transaction.oncomplete = () => resolve(request.result);
      transaction.onabort = transaction.onerror = () => reject(transaction.error ?? request.error);
    });
  } finally {
    database.close();
  }
}

/**
 * Returns the stored models; empty if the browser has no storage, as in a private window.
 * @returns {Promise<Kept[]>}
 */
export const keptModels = () => asked("readonly", store => store.getAll()).catch(() => []);

/** Stores the files of a source. @param {string} name @param {import("./types").Source} source */
export async function keepModel(name, source) {
  const { folder, files = [], tokenizer, dtype } = source;
  // Copies the files, because a chosen file becomes unreadable once it changes.
  const copies = await Promise.all(files.map(async ({ file, blob }) => ({ file, blob: new Blob([await blob.arrayBuffer()]) })));
  const bytes = copies.reduce((sum, one) => sum + one.blob.size, 0);
  await asked("readwrite", store => store.put({ name, bytes, source: { folder, files: copies, tokenizer, dtype } }));
}

/** @param {string} name */
export const dropModel = name => asked("readwrite", store => store.delete(name));
