import com.fasterxml.jackson.databind.ObjectMapper;
import io.debezium.config.Configuration;
import io.debezium.document.Document;
import io.debezium.embedded.EmbeddedEngineChangeEvent;
import io.debezium.engine.ChangeEvent;
import io.debezium.engine.DebeziumEngine;
import io.debezium.engine.Header;
import io.debezium.engine.format.Json;
import io.debezium.engine.format.KeyValueHeaderChangeEventFormat;
import io.debezium.engine.spi.OffsetCommitPolicy;
import io.debezium.jdbc.JdbcConfiguration;
import io.debezium.jdbc.JdbcConnection;
import io.debezium.relational.history.AbstractFileBasedSchemaHistory;
import io.debezium.relational.history.HistoryRecord;
import java.io.BufferedReader;
import java.io.File;
import java.io.FileInputStream;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.RandomAccessFile;
import java.lang.management.ManagementFactory;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardCopyOption;
import java.nio.file.StandardOpenOption;
import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HashSet;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import java.util.TreeMap;
import java.util.function.Consumer;
import javax.management.MBeanServer;
import javax.management.ObjectName;
import org.apache.kafka.connect.data.Struct;
import org.apache.kafka.connect.source.SourceRecord;
import org.apache.kafka.connect.storage.MemoryOffsetBackingStore;

/**
 * Debezium's engine, whose change events go to segments in a folder: sink/sources/engine.py tells what is in it.
 *
 * Janino compiles this file when it starts, since Java's own compiler isn't everywhere. It knows no lambdas, and no
 * type arguments, so there are casts.
 *
 * Its first line of input is a JSON object with the engine's properties. Each further line is a mark. When the input ends,
 * so does this process. It prints lines: "polling" when it reads the database's log, "caught " with a mark when the buffer
 * has all that was in the log when the mark came, "waiting" while another process has the buffer, and "failed " with a
 * JSON string at its end.
 */
public class Engine implements DebeziumEngine.ChangeConsumer, DebeziumEngine.CompletionCallback,
        DebeziumEngine.ConnectorCallback {
    static final ObjectMapper JSON = new ObjectMapper();
    static final String MARKS = "rowdelta-mark-";
    /** Those up to which the buffer hasn't come yet. */
    static final Set marks = java.util.concurrent.ConcurrentHashMap.newKeySet();
    static Path folder;
    static String id = java.util.UUID.randomUUID().toString();
    static Map ends = new TreeMap();
    static Properties properties;
    static Log log;
    static volatile boolean isPolling;
    static boolean isPollingTold;
    /** What the last records have in common: the connector goes on before or after all of them. */
    static Map group;
    static ChangeEvent last;
    /** Topic -> so many events of the group are in the buffer. */
    static Map begun = new TreeMap();
    /** The same, from the state: of this group so many events come again. */
    static String repeated;
    static Map repeats = new TreeMap();
    /** When the connector made the last heartbeat whose batch is in the buffer, and when the last batch was there. */
    static volatile long beat;
    static volatile long handled;

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
        String connector = properties.getProperty("connector.class");
        log = connector.contains(".postgresql.") ? new Postgres()
            : connector.matches(".*[.](mysql|mariadb)[.].*") ? new MySql() : new Log();
        Store.read();
        removeUnfinished();
        History.removeUnfinished();
        Store.write();
        log.check();
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
     * Several events may be one for the connector, which goes on before or after all of them: in Postgres those of one
     * offset, such as rows of COPY; in MySQL those of a transaction. So a batch that ends between them stores where they
     * begin, and how many of them the buffer has: they come again, and are left out.
     */
    public void handleBatch(List records, DebeziumEngine.RecordCommitter committer) throws InterruptedException {
        Map texts = new HashMap();
        Map next = new TreeMap(ends);
        String now = Long.toString(System.currentTimeMillis());
        Set came = new HashSet();
        ChangeEvent whole = null;
        long beaten = beat;
        for (Iterator i = records.iterator(); i.hasNext();) {
            ChangeEvent event = (ChangeEvent) i.next();
            Map its = log.group(record(event).sourceOffset());
            if (!its.equals(group)) {
                whole = last;
                group = its;
                begun = new TreeMap();
            }
            last = event;
            String topic = event.destination();
            String key = (String) event.key();
            String value = (String) event.value();
            if (topic.startsWith(properties.getProperty("topic.heartbeat.prefix", "__debezium-heartbeat"))) {
                beaten = ((Struct) record(event).value()).getInt64("ts_ms").longValue();
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
            if (begun.isEmpty() && !repeats.isEmpty() && !Store.value(group).equals(repeated)) {
                repeats = new TreeMap();
            }
            begun.put(topic, Long.valueOf(count(begun, topic) + 1L));
            if (count(repeats, topic) > 0L) {
                repeats.put(topic, Long.valueOf(count(repeats, topic) - 1L));
                continue;
            }
            StringBuilder text = (StringBuilder) texts.get(topic);
            if (text == null) {
                if (!topic.matches("[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}")) {
                    throw new IllegalStateException("the topic " + topic + " can't be a folder of the buffer");
                }
                text = new StringBuilder();
                texts.put(topic, text);
            }
            long at = count(next, topic);
            next.put(topic, Long.valueOf(at + 1));
            // JSON has no tabs or ends of lines in it
            text.append(at).append('\t').append(now).append('\t').append(key == null ? "" : key).append('\t');
            headers(text, event.headers());
            text.append('\t').append(value == null ? "" : value).append('\n');
        }
        if (group.containsKey("snapshot")) {
            begun = new TreeMap(); // if it isn't whole, it begins anew
        }
        if (begun.isEmpty()) {
            whole = last;
        }
        try {
            for (Iterator i = texts.entrySet().iterator(); i.hasNext();) {
                Map.Entry entry = (Map.Entry) i.next();
                Path topic = folder.resolve("topics").resolve((String) entry.getKey());
                Files.createDirectories(topic, new java.nio.file.attribute.FileAttribute[0]);
                long begin = count(ends, entry.getKey());
                Long events = Long.valueOf(count(next, entry.getKey()) - begin);
                String name = String.format("%020d-%d-" + now + ".tsv", new Object[] {Long.valueOf(begin), events});
                write(topic, name, entry.getValue().toString());
                flush(topic);
            }
            flush(Files.createDirectories(folder.resolve("topics"), new java.nio.file.attribute.FileAttribute[0]));
            ends = next;
            Map reached = log.reached(whole, last);
            String partition = Store.key(record(last).sourcePartition());
            boolean isFurther = reached != null && !Store.value(reached).equals(Store.offsets.get(partition));
            if (isFurther) {
                Store.offsets.put(partition, Store.value(reached));
            }
            if (isFurther || !texts.isEmpty()) {
                Store.write();
            }
        } catch (IOException error) {
            throw new IllegalStateException("the buffer " + folder + " can't be written: " + error, error);
        }
        // the database may now remove its log up to there
        if (whole != null) {
            committer.markProcessed(whole);
            committer.markBatchFinished();
        }
        for (Iterator m = came.iterator(); m.hasNext();) {
            caught((String) m.next());
        }
        beat = beaten;
        handled = System.currentTimeMillis();
        tellPolling();
    }

    static long count(Map counts, Object topic) {
        Long found = (Long) counts.get(topic);
        return found == null ? 0L : found.longValue();
    }

    /** Counts, as the state has them. */
    static Map counts(Object read) {
        Map found = new TreeMap();
        for (Iterator i = ((Map) read).entrySet().iterator(); i.hasNext();) {
            Map.Entry entry = (Map.Entry) i.next();
            found.put(entry.getKey(), Long.valueOf(((Number) entry.getValue()).longValue()));
        }
        return found;
    }

    static void caught(String mark) {
        if (marks.remove(mark)) {
            tell("caught " + mark);
        }
    }

    static synchronized void tellPolling() {
        if (!isPollingTold) {
            isPollingTold = true;
            tell("polling");
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
        if (!(log instanceof MySql)) { // whose server tells only afterwards that it lacks what is asked for
            tellPolling();
        }
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
                ends = counts(state.get("ends"));
                offsets.putAll((Map) state.get("offsets"));
                repeated = (String) state.get("begun");
                repeats = counts(state.get("events"));
                History.length = ((Number) state.get("history")).longValue();
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
            Map events = new TreeMap(begun);
            boolean areAllThere = group != null;
            for (Iterator i = repeats.keySet().iterator(); i.hasNext();) {
                Object topic = i.next();
                events.put(topic, Long.valueOf(count(begun, topic) + count(repeats, topic)));
                areAllThere = areAllThere && count(repeats, topic) == 0L;
            }
            state.put("begun", areAllThere ? value(group) : repeated);
            state.put("events", events);
            state.put("history", Long.valueOf(History.length));
            Engine.write(folder, "state.json", JSON.writeValueAsString(state));
            flush(folder);
        }

        public Set connectorPartitions(String connector) {
            return new HashSet();
        }
    }

    /** The schemas of tables over time, without which a binlog can't be read. They are in the buffer, a line for each. */
    public static class History extends AbstractFileBasedSchemaHistory {
        /** So long the file is. */
        static volatile long length;

        static File file() {
            return folder.resolve("history.jsonl").toFile();
        }

        /** Remove what came after the stored offset, which comes again. */
        static void removeUnfinished() throws IOException {
            if (file().length() < length) {
                fail("the buffer has lost " + file() + ", or a part of it, without which the database's log can't be read. "
                    + "Take a new snapshot: docs/without-kafka.md says how");
            }
            if (file().length() > length) {
                RandomAccessFile opened = new RandomAccessFile(file(), "rw");
                opened.setLength(length);
                opened.close();
            }
        }

        public boolean storageExists() {
            return file().exists();
        }

        protected void doStart() {
            try {
                if (file().exists()) {
                    toHistoryRecord(new FileInputStream(file()));
                }
            } catch (IOException error) {
                throw new IllegalStateException(error);
            }
        }

        protected void doStoreRecord(HistoryRecord record) {
            try {
                FileOutputStream out = new FileOutputStream(file(), true);
                try {
                    out.write((documentWriter.write(record.document()) + "\n").getBytes(StandardCharsets.UTF_8));
                    out.getFD().sync();
                } finally {
                    out.close();
                }
                records.add(record);
                length = file().length();
            } catch (IOException error) {
                throw new IllegalStateException("the buffer " + folder + " can't be written: " + error, error);
            }
        }

        /** Without statements that come again: one that renames a column can't be applied twice. */
        protected void recoverRecords(Consumer consumer) {
            String offsets = Store.offsets.values().toString();
            for (Iterator i = getRecords().iterator(); i.hasNext();) {
                HistoryRecord record = (HistoryRecord) i.next();
                Document position = record.document().getDocument("position");
                String gtids = position.getString("gtids");
                if (gtids == null || position.has("snapshot") || !offsets.contains("\"gtids\":\"" + gtids + "\"")) {
                    consumer.accept(record);
                }
            }
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

    static class Marker extends Thread {
        final String mark;

        Marker(String mark) {
            this.mark = mark;
        }

        public void run() {
            try {
                while (!isPolling) {
                    Thread.sleep(100L);
                }
                log.reach(this.mark);
            } catch (InterruptedException error) {
                return;
            } catch (Exception error) {
                fail("what the database's log has at the moment can't be waited for: " + error.getMessage());
            }
        }
    }

    /** What is to be known of a database, beside what its connector does. Of this kind nothing is. */
    static class Log {
        /** Check that the log has what comes after the offset. */
        void check() throws Exception {}

        /** The part of an offset that events have in common if the connector goes on before or after all of them. */
        Map group(Map offset) {
            return offset;
        }

        /**
         * The offset to go on from. Null: that which is stored.
         *
         * @param whole the last event of a group that is in the buffer as a whole. Null if there is no other one
         * @param last the last event that is in the buffer
         */
        Map reached(ChangeEvent whole, ChangeEvent last) {
            return whole == null ? null : record(whole).sourceOffset();
        }

        /** Have the mark caught when the buffer has all that is in the log now. */
        void reach(String mark) throws Exception {
            throw new IllegalStateException("nobody knows how for " + properties.getProperty("connector.class")
                + ", so trigger: available-now and loads are for Postgres, MySQL and MariaDB");
        }
    }

    static class Postgres extends Log {
        static Connection connect() throws SQLException {
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

        /** Put the mark into the log until it comes out. */
        void reach(String mark) throws Exception {
            while (marks.contains(mark)) {
                put(MARKS + mark);
                Thread.sleep(500L);
            }
        }

        /** In a transaction: Debezium finds where to go on only when one ends. */
        static void put(String mark) throws SQLException {
            Connection connection = connect();
            try {
                if (connection.getMetaData().getDatabaseMajorVersion() < 14) {
                    throw new SQLException("it needs Postgres 14 or newer");
                }
                connection.createStatement().execute("SELECT pg_logical_emit_message(true, '" + mark + "', '')");
            } finally {
                connection.close();
            }
        }

        /** The database keeps its log from what the buffer has said that it has. Then an older copy lacks some of it. */
        void check() throws Exception {
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

    /**
     * MySQL and MariaDB. An offset is a transaction, and how many of its events to skip. These aren't counted by the
     * connector: it counts the server's heartbeats too, as long as it doesn't see that a transaction has ended.
     */
    static class MySql extends Log {
        Map group(Map offset) {
            Map transaction = begin(offset);
            transaction.remove("ts_sec");
            return transaction;
        }

        Map reached(ChangeEvent whole, ChangeEvent last) {
            return begin(record(last).sourceOffset());
        }

        static Map begin(Map offset) {
            TreeMap kept = new TreeMap(offset);
            kept.remove("event");
            kept.remove("row");
            kept.subMap("transaction_", "transaction_~").clear();
            return kept;
        }

        /**
         * Watch that the connection stays: if the server closes it, the connector doesn't tell. The client's own watch would
         * begin a transaction again.
         */
        void check() {
            Thread watch = new Thread() {
                public void run() {
                    try {
                        long silence = 60000L + 2L * Long.parseLong(properties.getProperty("heartbeat.interval.ms"));
                        long now = System.currentTimeMillis();
                        for (long heard = now; now - heard < 10000L; now = System.currentTimeMillis()) {
                            Thread.sleep(1000L);
                            if (beat == 0L || Boolean.TRUE.equals(metric("Connected")) && now - handled < silence) {
                                heard = now;
                            }
                        }
                        fail("the database has closed the connection, or sends nothing");
                    } catch (Exception error) {
                        fail(error.toString());
                    }
                }
            };
            watch.setDaemon(true);
            watch.start();
        }

        /** What is put into the queue when the connector has read so far comes after all of it. */
        void reach(String mark) throws Exception {
            long[] end = end();
            // when a file ends, its name and the place in it don't change at once
            for (int times = 0; times < 2; times = hasRead(end) ? times + 1 : 0) {
                Thread.sleep(100L);
            }
            long read = System.currentTimeMillis();
            while (beat <= read) {
                Thread.sleep(100L);
            }
            caught(mark);
        }

        /** The number of the file of the binlog, and the place in it, that come next. */
        static long[] end() throws Exception {
            String kind = properties.getProperty("connector.class").replaceFirst("[^.]*$", "jdbc.")
                + (properties.getProperty("connector.class").contains(".mysql.") ? "MySql" : "MariaDb");
            Object made = Class.forName(kind + "ConnectionConfiguration")
                .getConstructor(new Class[] {Configuration.class})
                .newInstance(new Object[] {Configuration.from(properties)});
            JdbcConnection.ConnectionFactory factory = (JdbcConnection.ConnectionFactory)
                made.getClass().getMethod("factory", new Class[0]).invoke(made, new Object[0]);
            Connection connection = factory.connect(
                (JdbcConfiguration) made.getClass().getMethod("config", new Class[0]).invoke(made, new Object[0]));
            try {
                ResultSet found;
                try {
                    found = connection.createStatement().executeQuery("SHOW BINARY LOG STATUS");
                } catch (SQLException older) {
                    found = connection.createStatement().executeQuery("SHOW MASTER STATUS");
                }
                found.next();
                return new long[] {number(found.getString(1)), found.getLong(2)};
            } finally {
                connection.close();
            }
        }

        static boolean hasRead(long[] end) throws Exception {
            long file = number((String) metric("BinlogFilename"));
            Long place = (Long) metric("BinlogPosition");
            return file > end[0] || file == end[0] && place != null && place.longValue() >= end[1];
        }

        /** What the connector tells of its client. Null as long as there is none. */
        static Object metric(String name) throws Exception {
            MBeanServer beans = ManagementFactory.getPlatformMBeanServer();
            ObjectName all = new ObjectName("debezium.*:type=connector-metrics,context=streaming,*");
            Iterator found = beans.queryNames(all, null).iterator();
            return found.hasNext() ? beans.getAttribute((ObjectName) found.next(), name) : null;
        }

        /** Of binlog.000012. */
        static long number(String file) {
            return file == null || file.isEmpty() ? 0L : Long.parseLong(file.substring(file.lastIndexOf('.') + 1));
        }
    }
}
