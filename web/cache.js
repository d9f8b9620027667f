// @ts-check
// Models that are kept in the browser, in IndexedDB: their files, under the name of their source.

/** @typedef {{ name: string, bytes: number, source: import("./types").Source }} Kept */

/** @returns {Promise<IDBDatabase>} */
const opened = () => new Promise((resolve, reject) => {
  const request = indexedDB.open("gpt2", 1);
  request.onupgradeneeded = () => request.result.createObjectStore("models", { keyPath: "name" });
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

/** One request to the store. @template T @param {IDBTransactionMode} mode @param {(store: IDBObjectStore) => IDBRequest<T>} ask @returns {Promise<T>} */
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

/** The models that are kept; none where the browser keeps nothing, as in a private window. @returns {Promise<Kept[]>} */
export const keptModels = () => asked("readonly", store => store.getAll()).catch(() => []);

/** Keeps the files of a source. @param {string} name @param {import("./types").Source} source */
export async function keepModel(name, source) {
  const { folder, files = [], tokenizer, dtype } = source;
  // Copied: a file that was chosen cannot be read any more after it has changed.
  const copies = await Promise.all(files.map(async ({ file, blob }) => ({ file, blob: new Blob([await blob.arrayBuffer()]) })));
  const bytes = copies.reduce((sum, one) => sum + one.blob.size, 0);
  await asked("readwrite", store => store.put({ name, bytes, source: { folder, files: copies, tokenizer, dtype } }));
}

/** @param {string} name */
export const dropModel = name => asked("readwrite", store => store.delete(name));
