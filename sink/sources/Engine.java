import com.fasterxml.jackson.databind.ObjectMapper;
import io.debezium.engine.ChangeEvent;
import io.debezium.engine.DebeziumEngine;
import io.debezium.engine.Header;
import io.debezium.engine.format.Json;
import io.debezium.engine.format.KeyValueHeaderChangeEventFormat;
import io.debezium.engine.spi.OffsetCommitPolicy;
import java.io.BufferedReader;
import java.io.File;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.RandomAccessFile;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.channels.FileLock;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardCopyOption;
import java.nio.file.StandardOpenOption;
import java.sql.Connection;
import java.sql.DriverManager;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HashSet;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import java.util.TreeMap;
import org.apache.kafka.connect.storage.MemoryOffsetBackingStore;

/**
 * Debezium's engine, whose change events go to segments in a folder: sink/sources/engine.py tells what is in it.
 *
 * Janino compiles this file when it starts, since Java's own compiler isn't everywhere. It knows no lambdas, and no
 * type arguments, so there are casts.
 *
 * Its first line of input is a JSON object with the engine's properties. Each further line is a mark, which it puts into
 * the database's log. When the input ends, so does this process. It prints lines: "polling" when it reads the database's
 * log, "caught " with a mark when the buffer has all that was in the log before, and "failed " with a JSON string at its
 * end.
 */
public class Engine implements DebeziumEngine.ChangeConsumer, DebeziumEngine.CompletionCallback,
        DebeziumEngine.ConnectorCallback {
    static final ObjectMapper JSON = new ObjectMapper();
    static final String MARKS = "rowdelta-mark-";
    /** Those that haven't come out of the log yet. */
    static final Set marks = java.util.concurrent.ConcurrentHashMap.newKeySet();
    static FileLock lock;
    static Path folder;
    static String id = java.util.UUID.randomUUID().toString();
    static Map ends = new TreeMap();
    static Properties properties;

    public static void main(String[] arguments) throws Exception {
        BufferedReader input = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        properties = (Properties) JSON.readValue(input.readLine(), Properties.class);
        folder = Path.of((String) properties.remove("rowdelta.buffer"), new String[0]);
        Thread reader = new Input(input);
        reader.setDaemon(true);
        reader.start();
        // whoever had this buffer before may still be ending
        lock = new RandomAccessFile(folder.resolve("lock").toFile(), "rw").getChannel().lock();
        Store.read();
        removeUnfinished();
        Store.write();
        Engine engine = new Engine();
        DebeziumEngine made = DebeziumEngine
            .create(KeyValueHeaderChangeEventFormat.of(Json.class, Json.class, Json.class))
            .using(properties)
            .using(Engine.class.getClassLoader())
            .using((OffsetCommitPolicy) OffsetCommitPolicy.always())
            .using((DebeziumEngine.CompletionCallback) engine)
            .using((DebeziumEngine.ConnectorCallback) engine)
            .notifying((DebeziumEngine.ChangeConsumer) engine)
            .build();
        made.run();
        Runtime.getRuntime().halt(1);
    }

    /** Remove what a process has begun and not finished, which the database's log will give again. */
    static void removeUnfinished() throws IOException {
        File[] topics = folder.resolve("topics").toFile().listFiles();
        for (int t = 0; topics != null && t < topics.length; t++) {
            Long end = (Long) ends.get(topics[t].getName());
            String[] segments = topics[t].list();
            for (int s = 0; s < segments.length; s++) {
                if (segments[s].startsWith(".") || end == null
                        || Long.parseLong(segments[s].substring(0, 20)) >= end.longValue()) {
                    Files.delete(topics[t].toPath().resolve(segments[s]));
                }
            }
        }
    }

    public boolean supportsTombstoneEvents() {
        return true;
    }

    /** Make a batch durable: a segment for each of its topics, and then, in one file, their ends and the offset. */
    public void handleBatch(List records, DebeziumEngine.RecordCommitter committer) throws InterruptedException {
        Map texts = new HashMap();
        Map begun = new TreeMap(ends);
        String now = Long.toString(System.currentTimeMillis());
        Set came = new HashSet();
        for (Iterator i = records.iterator(); i.hasNext();) {
            ChangeEvent event = (ChangeEvent) i.next();
            String topic = event.destination();
            String key = (String) event.key();
            String value = (String) event.value();
            if (key != null && topic.endsWith(".message") && key.contains(MARKS)) {
                for (Iterator m = marks.iterator(); m.hasNext();) {
                    String mark = (String) m.next();
                    if (key.contains(mark)) {
                        came.add(mark);
                    }
                }
                continue;
            }
            if (topic.startsWith("__debezium-heartbeat")) {
                continue;
            }
            StringBuilder text = (StringBuilder) texts.get(topic);
            if (text == null) {
                text = new StringBuilder();
                texts.put(topic, text);
            }
            Long offset = (Long) begun.get(topic);
            long at = offset == null ? 0L : offset.longValue();
            begun.put(topic, Long.valueOf(at + 1));
            // JSON has no tabs or ends of lines in it
            text.append(at).append('\t').append(now).append('\t').append(key == null ? "" : key).append('\t');
            headers(text, event.headers());
            text.append('\t').append(value == null ? "" : value).append('\n');
        }
        try {
            for (Iterator i = texts.entrySet().iterator(); i.hasNext();) {
                Map.Entry entry = (Map.Entry) i.next();
                Path topic = folder.resolve("topics").resolve((String) entry.getKey());
                if (!Files.isDirectory(topic, new java.nio.file.LinkOption[0])) {
                    Files.createDirectories(topic, new java.nio.file.attribute.FileAttribute[0]);
                    flush(topic.getParent());
                }
                Long first = (Long) ends.get(entry.getKey());
                long begin = first == null ? 0L : first.longValue();
                String name = String.format("%020d-" + now + ".tsv", new Object[] {Long.valueOf(begin)});
                write(topic, name, entry.getValue().toString());
                flush(topic);
            }
        } catch (IOException error) {
            throw new IllegalStateException("the buffer " + folder + " can't be written: " + error, error);
        }
        ends = begun;
        for (Iterator i = records.iterator(); i.hasNext();) {
            committer.markProcessed(i.next());
        }
        committer.markBatchFinished();
        for (Iterator m = came.iterator(); m.hasNext();) {
            String mark = (String) m.next();
            if (marks.remove(mark)) {
                tell("caught " + mark);
            }
        }
    }

    static void headers(StringBuilder text, List headers) {
        if (headers == null || headers.isEmpty()) {
            return;
        }
        text.append('{');
        for (int i = 0; i < headers.size(); i++) {
            Header header = (Header) headers.get(i);
            text.append(i == 0 ? "\"" : ",\"").append(header.getKey()).append("\":").append(header.getValue());
        }
        text.append('}');
    }

    static void write(Path parent, String name, String text) throws IOException {
        Path partial = parent.resolve("." + name);
        FileOutputStream out = new FileOutputStream(partial.toFile());
        try {
            out.write(text.getBytes(StandardCharsets.UTF_8));
            out.getFD().sync();
        } finally {
            out.close();
        }
        Files.move(partial, parent.resolve(name), new java.nio.file.CopyOption[] {StandardCopyOption.ATOMIC_MOVE});
    }

    static void flush(Path folder) throws IOException {
        FileChannel channel = FileChannel.open(folder, new java.nio.file.OpenOption[] {StandardOpenOption.READ});
        try {
            channel.force(true);
        } finally {
            channel.close();
        }
    }

    static synchronized void tell(String line) {
        System.out.println(line);
        System.out.flush();
    }

    public void connectorStarted() {}

    public void connectorStopped() {}

    public void taskStarted() {}

    public void taskStopped() {}

    public void pollingStarted() {
        tell("polling");
    }

    public void pollingStopped() {}

    public void handle(boolean success, String message, Throwable error) {
        StringBuilder text = new StringBuilder(message == null ? "" : message);
        for (Throwable cause = error; cause != null; cause = cause.getCause()) {
            if (cause.getMessage() != null && text.indexOf(cause.getMessage()) < 0) {
                text.append(text.length() == 0 ? "" : ": ").append(cause.getMessage());
            }
        }
        try {
            tell("failed " + JSON.writeValueAsString(text.toString()));
        } catch (IOException impossible) {
            throw new IllegalStateException(impossible);
        }
        Runtime.getRuntime().halt(1);
    }

    /** Where the engine keeps its offset: in one file with the ends of the topics. */
    public static class Store extends MemoryOffsetBackingStore {
        static Map offsets = new HashMap();

        static void read() throws IOException {
            File file = folder.resolve("state.json").toFile();
            if (file.exists()) {
                Map state = (Map) JSON.readValue(file, Map.class);
                id = (String) state.get("id");
                for (Iterator i = ((Map) state.get("ends")).entrySet().iterator(); i.hasNext();) {
                    Map.Entry entry = (Map.Entry) i.next();
                    ends.put(entry.getKey(), Long.valueOf(((Number) entry.getValue()).longValue()));
                }
                for (Iterator i = ((Map) state.get("offsets")).entrySet().iterator(); i.hasNext();) {
                    Map.Entry entry = (Map.Entry) i.next();
                    offsets.put(bytes((String) entry.getKey()), bytes((String) entry.getValue()));
                }
            }
        }

        static ByteBuffer bytes(String text) {
            return ByteBuffer.wrap(text.getBytes(StandardCharsets.UTF_8));
        }

        static String text(Object bytes) {
            return new String(((ByteBuffer) bytes).array(), StandardCharsets.UTF_8);
        }

        public void start() {
            super.start();
            data = new HashMap(offsets);
        }

        static void write() throws IOException {
            Map texts = new TreeMap();
            for (Iterator i = offsets.entrySet().iterator(); i.hasNext();) {
                Map.Entry entry = (Map.Entry) i.next();
                if (entry.getValue() != null) {
                    texts.put(text(entry.getKey()), text(entry.getValue()));
                }
            }
            Map state = new TreeMap();
            state.put("id", id);
            state.put("ends", ends);
            state.put("offsets", texts);
            Engine.write(folder, "state.json", JSON.writeValueAsString(state));
            flush(folder);
        }

        protected void save() {
            offsets = data;
            try {
                write();
            } catch (IOException error) {
                throw new IllegalStateException("the buffer " + folder + " can't be written: " + error, error);
            }
        }

        public Set connectorPartitions(String connector) {
            return new HashSet();
        }
    }

    static class Input extends Thread {
        final BufferedReader input;

        Input(BufferedReader input) {
            this.input = input;
        }

        public void run() {
            try {
                for (String mark = this.input.readLine(); mark != null; mark = this.input.readLine()) {
                    marks.add(mark);
                    Thread marker = new Marker(mark);
                    marker.setDaemon(true);
                    marker.start();
                }
            } catch (IOException error) {
                // the same
            }
            Runtime.getRuntime().halt(0);
        }
    }

    /** Puts a mark into the log of Postgres until it comes back: what was there before is in the buffer. */
    static class Marker extends Thread {
        final String mark;

        Marker(String mark) {
            this.mark = mark;
        }

        public void run() {
            String url = "jdbc:postgresql://" + properties.getProperty("database.hostname") + ":"
                + properties.getProperty("database.port", "5432") + "/" + properties.getProperty("database.dbname");
            Properties login = new Properties();
            login.put("user", properties.getProperty("database.user", ""));
            login.put("password", properties.getProperty("database.password", ""));
            String[] names = new String[] {"sslmode", "sslcert", "sslkey", "sslrootcert", "sslpassword"};
            for (int i = 0; i < names.length; i++) {
                if (properties.getProperty("database." + names[i]) != null) {
                    login.put(names[i], properties.getProperty("database." + names[i]));
                }
            }
            while (marks.contains(this.mark)) {
                try {
                    Connection connection = DriverManager.getConnection(url, login);
                    try {
                        connection.createStatement()
                            .execute("SELECT pg_logical_emit_message(false, '" + MARKS + this.mark + "', '')");
                    } finally {
                        connection.close();
                    }
                } catch (java.sql.SQLException error) {
                    // the connector meets it too, and says it
                }
                try {
                    Thread.sleep(500L);
                } catch (InterruptedException error) {
                    return;
                }
            }
        }
    }
}
