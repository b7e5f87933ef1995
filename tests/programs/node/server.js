// An HTTP server: node server.js PORT FOLDER
'use strict';
const fs = require('node:fs');
const http = require('node:http');
const path = require('node:path');

const [port, folder] = process.argv.slice(2);
http.createServer((request, answer) => {
  if (request.method === 'POST') {
    const parts = [];
    request.on('data', (part) => parts.push(part));
    request.on('end', () => answer.end(Buffer.concat(parts)));
    return;
  }
  fs.readFile(path.join(folder, path.basename(request.url)), (error, content) => {
    answer.statusCode = error ? 404 : 200;
    answer.end(content);
  });
}).listen(Number(port), '0.0.0.0');
