import com.fasterxml.jackson.databind.ObjectMapper;
import io.debezium.embedded.EmbeddedEngineChangeEvent;
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
import org.apache.kafka.connect.source.SourceRecord;
import org.apache.kafka.connect.storage.MemoryOffsetBackingStore;

/**
 * Debezium's engine, whose change events go to segments in a folder: sink/sources/engine.py tells what is in it.
 *
 * Janino compiles this file when it starts, since Java's own compiler isn't everywhere. It knows no lambdas, and no
 * type arguments, so there are casts.
 *
 * Its first line of input is a JSON object with the engine's properties. Each further line is a mark, which it puts into
 * the database's log. When the input ends, so does this process. It prints lines: "polling" when it reads the database's
 * log, "caught " with a mark when the buffer has all that was in the log before, "waiting" while another process has the
 * buffer, and "failed " with a JSON string at its end.
 */
public class Engine implements DebeziumEngine.ChangeConsumer, DebeziumEngine.CompletionCallback,
        DebeziumEngine.ConnectorCallback {
    static final ObjectMapper JSON = new ObjectMapper();
    static final String MARKS = "rowdelta-mark-";
    /** Those that haven't come out of the log yet. */
    static final Set marks = java.util.concurrent.ConcurrentHashMap.newKeySet();
    static Path folder;
    static String id = java.util.UUID.randomUUID().toString();
    static Map ends = new TreeMap();
    static Properties properties;
    static volatile boolean isPolling;
    /** The offset of the last records. It is stored when another one comes: only then the buffer has all of its events. */
    static Map group;
    static ChangeEvent last;
    /** So many events of it are in the buffer. */
    static long begun;
    /** The same, from the state: of this offset so many events come again. */
    static String repeated;
    static long repeats;

    public static void main(String[] arguments) throws Exception {
        BufferedReader input = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        properties = (Properties) JSON.readValue(input.readLine(), Properties.class);
        folder = Path.of((String) properties.remove("rowdelta.buffer"), new String[0]);
        Thread reader = new Input(input);
        reader.setDaemon(true);
        reader.start();
        FileChannel lock = new RandomAccessFile(folder.resolve("lock").toFile(), "rw").getChannel();
        if (lock.tryLock() == null) {
            tell("waiting");
            lock.lock();
        }
        Store.read();
        removeUnfinished();
        Store.write();
        Postgres.checkSlot();
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
            for (int s = 0; segments != null && s < segments.length; s++) {
                boolean isWhole = segments[s].matches("\\d{20}-.*");
                if (segments[s].startsWith(".") || isWhole && (end == null
                        || Long.parseLong(segments[s].substring(0, 20)) >= end.longValue())) {
                    Files.delete(topics[t].toPath().resolve(segments[s]));
                }
            }
        }
    }

    public boolean supportsTombstoneEvents() {
        return true;
    }

    /**
     * Make a batch durable: a segment for each of its topics, and then, in one file, their ends and the offset.
     *
     * Several events may have one offset: the delete and the insert of a key that changes, and rows of COPY. A connector
     * goes on after all of them, so a batch that ends between them must not store it. The state has the one before, and
     * how many events the buffer has beyond: they come again, and are left out.
     */
    public void handleBatch(List records, DebeziumEngine.RecordCommitter committer) throws InterruptedException {
        Map texts = new HashMap();
        Map next = new TreeMap(ends);
        String now = Long.toString(System.currentTimeMillis());
        Set came = new HashSet();
        ChangeEvent whole = null;
        for (Iterator i = records.iterator(); i.hasNext();) {
            ChangeEvent event = (ChangeEvent) i.next();
            Map offset = record(event).sourceOffset();
            if (!offset.equals(group)) {
                whole = last;
                group = offset;
                begun = 0L;
            }
            last = event;
            String topic = event.destination();
            String key = (String) event.key();
            String value = (String) event.value();
            if (topic.startsWith(properties.getProperty("topic.heartbeat.prefix", "__debezium-heartbeat"))) {
                continue;
            }
            if (key != null && topic.equals(properties.getProperty("topic.prefix") + ".message") && key.contains(MARKS)) {
                for (Iterator m = marks.iterator(); m.hasNext();) {
                    String mark = (String) m.next();
                    if (key.contains(mark)) {
                        came.add(mark);
                    }
                }
                continue;
            }
            begun++;
            if (repeats > 0L) {
                repeats = Store.value(group).equals(repeated) ? repeats - 1L : -1L;
                if (repeats >= 0L) {
                    continue;
                }
            }
            StringBuilder text = (StringBuilder) texts.get(topic);
            if (text == null) {
                if (!topic.matches("[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}")) {
                    throw new IllegalStateException("the topic " + topic + " can't be a folder of the buffer");
                }
                text = new StringBuilder();
                texts.put(topic, text);
            }
            Long end = (Long) next.get(topic);
            long at = end == null ? 0L : end.longValue();
            next.put(topic, Long.valueOf(at + 1));
            // JSON has no tabs or ends of lines in it
            text.append(at).append('\t').append(now).append('\t').append(key == null ? "" : key).append('\t');
            headers(text, event.headers());
            text.append('\t').append(value == null ? "" : value).append('\n');
        }
        if (group.containsKey("snapshot")) {
            begun = 0L; // if it isn't whole, it begins anew
        }
        if (begun == 0L) {
            whole = last;
        }
        try {
            for (Iterator i = texts.entrySet().iterator(); i.hasNext();) {
                Map.Entry entry = (Map.Entry) i.next();
                Path topic = folder.resolve("topics").resolve((String) entry.getKey());
                Files.createDirectories(topic, new java.nio.file.attribute.FileAttribute[0]);
                Long first = (Long) ends.get(entry.getKey());
                long begin = first == null ? 0L : first.longValue();
                long count = ((Long) next.get(entry.getKey())).longValue() - begin;
                String name = String.format("%020d-%d-" + now + ".tsv", new Object[] {Long.valueOf(begin), Long.valueOf(count)});
                write(topic, name, entry.getValue().toString());
                flush(topic);
            }
            flush(Files.createDirectories(folder.resolve("topics"), new java.nio.file.attribute.FileAttribute[0]));
            ends = next;
            if (whole != null) {
                Store.offsets.put(Store.key(record(whole).sourcePartition()), Store.value(record(whole).sourceOffset()));
            }
            Store.write();
        } catch (IOException error) {
            throw new IllegalStateException("the buffer " + folder + " can't be written: " + error, error);
        }
        // the database may now remove its log up to there
        if (whole != null) {
            committer.markProcessed(whole);
            committer.markBatchFinished();
        }
        for (Iterator m = came.iterator(); m.hasNext();) {
            String mark = (String) m.next();
            if (marks.remove(mark)) {
                tell("caught " + mark);
            }
        }
    }

    static SourceRecord record(ChangeEvent event) {
        return ((EmbeddedEngineChangeEvent) event).sourceRecord();
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
        isPolling = true;
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
        fail(text.toString());
    }

    static void fail(String why) {
        try {
            tell("failed " + JSON.writeValueAsString(why));
        } catch (IOException impossible) {
            throw new IllegalStateException(impossible);
        }
        Runtime.getRuntime().halt(1);
    }

    /** Where the engine finds its offset: in one file with the ends of the topics. */
    public static class Store extends MemoryOffsetBackingStore {
        /** As Connect writes them: JSON of a connector's partition, and of its offset. */
        static Map offsets = new TreeMap();

        static void read() throws IOException {
            File file = folder.resolve("state.json").toFile();
            if (file.exists()) {
                Map state = (Map) JSON.readValue(file, Map.class);
                id = (String) state.get("id");
                for (Iterator i = ((Map) state.get("ends")).entrySet().iterator(); i.hasNext();) {
                    Map.Entry entry = (Map.Entry) i.next();
                    ends.put(entry.getKey(), Long.valueOf(((Number) entry.getValue()).longValue()));
                }
                offsets.putAll((Map) state.get("offsets"));
                repeated = (String) state.get("begun");
                repeats = ((Number) state.get("events")).longValue();
            }
        }

        static String key(Map partition) throws IOException {
            return JSON.writeValueAsString(new Object[] {properties.getProperty("name"), partition});
        }

        static String value(Map offset) {
            try {
                return JSON.writeValueAsString(new TreeMap(offset));
            } catch (IOException impossible) {
                throw new IllegalStateException(impossible);
            }
        }

        static ByteBuffer bytes(Object text) {
            return ByteBuffer.wrap(((String) text).getBytes(StandardCharsets.UTF_8));
        }

        public void start() {
            super.start();
            for (Iterator i = offsets.entrySet().iterator(); i.hasNext();) {
                Map.Entry entry = (Map.Entry) i.next();
                data.put(bytes(entry.getKey()), bytes(entry.getValue()));
            }
        }

        static void write() throws IOException {
            Map state = new TreeMap();
            state.put("id", id);
            state.put("ends", ends);
            state.put("offsets", offsets);
            state.put("begun", repeats > 0L || group == null ? repeated : value(group));
            state.put("events", Long.valueOf(begun + Math.max(0L, repeats)));
            Engine.write(folder, "state.json", JSON.writeValueAsString(state));
            flush(folder);
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

    /** Puts a mark into the database's log until it comes back: what was there before is in the buffer. */
    static class Marker extends Thread {
        final String mark;

        Marker(String mark) {
            this.mark = mark;
        }

        public void run() {
            try {
                while (marks.contains(this.mark)) {
                    if (isPolling) {
                        Postgres.put(MARKS + this.mark);
                    }
                    Thread.sleep(500L);
                }
            } catch (java.sql.SQLException error) {
                fail("no mark can be put into the database's log: " + error.getMessage());
            } catch (InterruptedException error) {
                return;
            }
        }
    }

    static class Postgres {
        static Connection connect() throws java.sql.SQLException {
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
            return DriverManager.getConnection(url, login);
        }

        /** In a transaction: Debezium finds where to go on only when one ends. */
        static void put(String mark) throws java.sql.SQLException {
            Connection connection = connect();
            try {
                if (connection.getMetaData().getDatabaseMajorVersion() < 14) {
                    throw new java.sql.SQLException("it needs Postgres 14 or newer");
                }
                connection.createStatement().execute("SELECT pg_logical_emit_message(true, '" + mark + "', '')");
            } finally {
                connection.close();
            }
        }

        /** The database keeps its log from what the buffer has said that it has. Then an older copy lacks some of it. */
        static void checkSlot() throws Exception {
            long reached = 0L;
            for (Iterator i = Store.offsets.values().iterator(); i.hasNext();) {
                Map offset = (Map) JSON.readValue((String) i.next(), Map.class);
                String[] names = new String[] {"lsn", "lsn_proc", "lsn_commit"};
                for (int n = 0; n < names.length; n++) {
                    Number lsn = (Number) offset.get(names[n]);
                    reached = lsn == null ? reached : Math.max(reached, lsn.longValue());
                }
            }
            if (reached == 0L) {
                return;
            }
            Connection connection = connect();
            try {
                java.sql.PreparedStatement statement = connection.prepareStatement(
                    "SELECT 1 FROM pg_replication_slots WHERE slot_name = ? AND confirmed_flush_lsn - '0/0' > ?");
                statement.setString(1, properties.getProperty("slot.name", "debezium"));
                statement.setLong(2, reached);
                if (statement.executeQuery().next()) {
                    fail("the replication slot is ahead of the buffer: the log between them is lost. Is the slot a new "
                        + "one, or the buffer an older copy, or does somebody else read the slot? Take a new snapshot: "
                        + "docs/without-kafka.md says how");
                }
            } finally {
                connection.close();
            }
        }
    }
}
