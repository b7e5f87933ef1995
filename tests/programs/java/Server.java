import com.sun.net.httpserver.HttpExchange;
import com.sun.net.httpserver.HttpServer;
import java.io.IOException;
import java.net.InetSocketAddress;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.concurrent.Executors;

/** An HTTP server of the JDK: java Server PORT FOLDER */
public final class Server {
    public static void main(String[] args) throws IOException {
        Path folder = Path.of(args[1]);
        HttpServer server = HttpServer.create(new InetSocketAddress(Integer.parseInt(args[0])), 128);
        server.setExecutor(Executors.newFixedThreadPool(8));
        server.createContext("/", exchange -> answer(exchange, folder));
        server.start();
    }

    private static void answer(HttpExchange exchange, Path folder) throws IOException {
        byte[] content;
        if (exchange.getRequestMethod().equals("POST")) {
            content = exchange.getRequestBody().readAllBytes();
        } else {
            String name = Path.of(exchange.getRequestURI().getPath()).getFileName().toString();
            content = Files.readAllBytes(folder.resolve(name));
        }
        exchange.sendResponseHeaders(200, content.length == 0 ? -1 : content.length);
        exchange.getResponseBody().write(content);
        exchange.close();
    }
}
