// @ts-check
// The page of a server.
import { start } from "./page.js";
import { server } from "./server.js";

start(server);
