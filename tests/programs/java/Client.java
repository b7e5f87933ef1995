import java.io.IOException;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse;
import java.net.http.HttpResponse.BodyHandlers;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.Callable;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.stream.Stream;

/**
 * Asks an HTTP server for each body, sends each, and checks every byte:
 * java Client HOST:PORT FOLDER SECONDS
 */
public final class Client {
    private static final int WORKERS = 4;

    public static void main(String[] args) throws Exception {
        List<Path> bodies;
        try (Stream<Path> files = Files.list(Path.of(args[1]))) {
            bodies = files.filter(it -> it.getFileName().toString().startsWith("body-")).toList();
        }
        long end = System.nanoTime() + (long) (1e9 * Double.parseDouble(args[2]));
        Callable<Integer> work = () -> work("http://" + args[0], bodies, end);
        var threads = Executors.newFixedThreadPool(WORKERS);
        List<Future<Integer>> workers = new ArrayList<>();
        for (int number = 0; number < WORKERS; number++) {
            workers.add(threads.submit(work));
        }
        int answers = 0;
        for (Future<Integer> worker : workers) {
            answers += worker.get();
        }
        System.out.println(answers);
        System.exit(0);
    }

    private static int work(String url, List<Path> bodies, long end) throws Exception {
        HttpClient client = HttpClient.newBuilder().version(HttpClient.Version.HTTP_1_1).build();
        int answers = 0;
        for (int turn = 0; turn < bodies.size() || System.nanoTime() < end; turn++) {
            Path path = bodies.get(turn % bodies.size());
            byte[] body = Files.readAllBytes(path);
            URI get = URI.create(url + "/" + path.getFileName());
            check(client, HttpRequest.newBuilder(get).build(), body);
            URI post = URI.create(url + "/echo");
            check(client, HttpRequest.newBuilder(post).POST(BodyPublishers.ofByteArray(body)).build(), body);
            answers += 2;
        }
        return answers;
    }

    private static void check(HttpClient client, HttpRequest request, byte[] body)
            throws IOException, InterruptedException {
        HttpResponse<byte[]> answer = client.send(request, BodyHandlers.ofByteArray());
        if (answer.statusCode() != 200 || !Arrays.equals(answer.body(), body)) {
            throw new IOException(request + ": a wrong answer");
        }
    }
}
