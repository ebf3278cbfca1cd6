import java.io.BufferedReader;
import java.io.File;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.net.URI;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import org.apache.flink.api.common.JobID;
import org.apache.flink.configuration.CheckpointingOptions;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.configuration.RestOptions;
import org.apache.flink.configuration.TaskManagerOptions;
import org.apache.flink.configuration.MemorySize;
import org.apache.flink.core.execution.CheckpointType;
import org.apache.flink.runtime.jobgraph.JobGraph;
import org.apache.flink.runtime.minicluster.MiniCluster;
import org.apache.flink.runtime.minicluster.MiniClusterConfiguration;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.source.legacy.RichParallelSourceFunction;
import org.apache.flink.table.data.GenericRowData;
import org.apache.flink.table.data.RowData;
import org.apache.flink.table.runtime.typeutils.InternalTypeInfo;
import org.apache.flink.types.RowKind;
import org.apache.hadoop.fs.FileSystem;
import org.apache.iceberg.Schema;
import org.apache.iceberg.SnapshotSummary;
import org.apache.iceberg.Table;
import org.apache.iceberg.events.CreateSnapshotEvent;
import org.apache.iceberg.events.Listeners;
import org.apache.iceberg.flink.FlinkSchemaUtil;
import org.apache.iceberg.flink.TableLoader;
import org.apache.iceberg.flink.data.FlinkParquetReaders;
import org.apache.iceberg.flink.sink.IcebergSink;
import org.apache.iceberg.io.CloseableIterable;
import org.apache.iceberg.mapping.MappingUtil;
import org.apache.iceberg.mapping.NameMapping;
import org.apache.iceberg.parquet.Parquet;
import org.apache.iceberg.types.Types;

/**
 * Flink's Iceberg sink on a mini cluster in this process, asked line by line by `benchmarks.peers.writers`.
 *
 * <p>A line is a verb and its values, with tabs in between. Each answer begins with `@`:
 *
 * <pre>
 * start LOCATION STATE FORM MAINTENANCE    a job that writes the table at LOCATION
 * batch FILE...                            a micro-batch: one file for each source, then one checkpoint
 * settle SECONDS                           wait until maintenance has nothing left to do, at most so long
 * stop                                     cancel the job
 * </pre>
 *
 * <p>FORM is `upsert`, Flink's mode of this name, or `changelog`, in which rows before an update are deleted where they
 * are: tables that are partitioned by other columns than the key need it. MAINTENANCE is `rewrite` (small files become
 * large ones), `convert` (equality deletes become deletion vectors), or `none`.
 *
 * <p>The sources wait for files instead of polling for them, and a checkpoint is triggered as soon as the files were
 * read. So each checkpoint has exactly one micro-batch, and no time is lost between two of them. The answer comes when
 * the checkpoint's snapshot is in the table.
 */
public final class FlinkUpserts {
  private static final int PARALLELISM = 2;
  private static final long MOST_SECONDS = 1800;
  private static final String CHECKPOINT = "flink.max-committed-checkpoint-id";
  private static final List<BlockingQueue<String>> FILES = new ArrayList<>();
  private static final Map<Long, CompletableFuture<Long>> COMMITTED = new ConcurrentHashMap<>();
  private static volatile CountDownLatch unread = new CountDownLatch(0);
  private static volatile long lastCommit = System.nanoTime();

  private final PrintStream answers;
  private MiniCluster cluster;
  private JobID job;
  private TableLoader table;
  private String maintenance = "none";

  private FlinkUpserts(PrintStream answers) {
    this.answers = answers;
  }

  /** Reads change files: the columns of the table, and the kind of each row. */
  public static final class ChangeFiles extends RichParallelSourceFunction<RowData> {
    private final Schema schema;
    private volatile boolean running = true;

    ChangeFiles(Schema schema) {
      this.schema = schema;
    }

    @Override
    public void run(SourceContext<RowData> context) throws Exception {
      BlockingQueue<String> files = FILES.get(getRuntimeContext().getTaskInfo().getIndexOfThisSubtask());
      while (running) {
        String file = files.poll(100, TimeUnit.MILLISECONDS);
        if (file == null) {
          continue;
        }
        synchronized (context.getCheckpointLock()) {
          read(file, context);
        }
        unread.countDown();
      }
    }

    private void read(String file, SourceContext<RowData> context) throws Exception {
      NameMapping names = MappingUtil.create(schema);
      int columns = schema.columns().size() - 1;
      RowData.FieldGetter[] getters = new RowData.FieldGetter[columns];
      for (int column = 0; column < columns; column++) {
        getters[column] = RowData.createFieldGetter(FlinkSchemaUtil.convert(schema).getTypeAt(column), column);
      }
      try (CloseableIterable<RowData> rows =
          Parquet.read(org.apache.iceberg.Files.localInput(new File(file)))
              .project(schema)
              .withNameMapping(names)
              .createReaderFunc(type -> FlinkParquetReaders.buildReader(schema, type))
              .build()) {
        for (RowData row : rows) {
          GenericRowData change = new GenericRowData(kind(row.getString(columns).toString()), columns);
          for (int column = 0; column < columns; column++) {
            change.setField(column, getters[column].getFieldOrNull(row));
          }
          context.collect(change);
        }
      }
    }

    private static RowKind kind(String name) {
      switch (name) {
        case "+I":
          return RowKind.INSERT;
        case "-U":
          return RowKind.UPDATE_BEFORE;
        case "+U":
          return RowKind.UPDATE_AFTER;
        case "-D":
          return RowKind.DELETE;
        default:
          throw new IllegalArgumentException(name);
      }
    }

    @Override
    public void cancel() {
      running = false;
    }
  }

  public static void main(String[] arguments) throws Exception {
    PrintStream answers = System.out;
    System.setOut(System.err);
    for (int source = 0; source < PARALLELISM; source++) {
      FILES.add(new LinkedBlockingQueue<>());
    }
    Listeners.register(FlinkUpserts::committed, CreateSnapshotEvent.class);
    FlinkUpserts upserts = new FlinkUpserts(answers);
    BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
    for (String line = lines.readLine(); line != null; line = lines.readLine()) {
      try {
        answers.println("@ok\t" + upserts.answer(line.split("\t")));
      } catch (Exception error) {
        error.printStackTrace();
        answers.println("@error\t" + String.valueOf(error).replaceAll("\\s+", " "));
      }
      answers.flush();
    }
    System.exit(0);
  }

  private static void committed(CreateSnapshotEvent event) {
    lastCommit = System.nanoTime();
    String checkpoint = event.summary().get(CHECKPOINT);
    if (checkpoint != null) {
      COMMITTED.computeIfAbsent(Long.valueOf(checkpoint), id -> new CompletableFuture<>()).complete(lastCommit);
    }
  }

  private String answer(String[] words) throws Exception {
    switch (words[0]) {
      case "start":
        start(words[1], words[2], words[3], words[4]);
        return "";
      case "batch":
        return Double.toString(batch(words));
      case "settle":
        return Double.toString(settle(Double.parseDouble(words[1])));
      case "stop":
        cluster.cancelJob(job).get(MOST_SECONDS, TimeUnit.SECONDS);
        cluster.requestJobResult(job).get(MOST_SECONDS, TimeUnit.SECONDS);
        COMMITTED.clear();
        return "";
      default:
        throw new IllegalArgumentException(words[0]);
    }
  }

  private void start(String location, String state, String form, String maintenanceTask) throws Exception {
    maintenance = maintenanceTask;
    Configuration settings = new Configuration();
    settings.set(RestOptions.ADDRESS, "127.0.0.1");
    settings.set(RestOptions.BIND_ADDRESS, "127.0.0.1");
    settings.set(RestOptions.BIND_PORT, "0");
    settings.set(TaskManagerOptions.NETWORK_MEMORY_MIN, MemorySize.ofMebiBytes(128));
    settings.set(TaskManagerOptions.NETWORK_MEMORY_MAX, MemorySize.ofMebiBytes(128));
    settings.set(CheckpointingOptions.CHECKPOINT_STORAGE, "filesystem");
    settings.set(CheckpointingOptions.CHECKPOINTS_DIRECTORY, new File(state).toURI().toString());
    if (cluster == null) {
      cluster =
          new MiniCluster(
              new MiniClusterConfiguration.Builder()
                  .setConfiguration(settings)
                  .setNumTaskManagers(1)
                  .setNumSlotsPerTaskManager(PARALLELISM)
                  .build());
      cluster.start();
    }
    org.apache.hadoop.conf.Configuration hadoop = new org.apache.hadoop.conf.Configuration();
    hadoop.set("fs.file.impl", "com.globalmentor.apache.hadoop.fs.BareLocalFileSystem");
    FileSystem.get(URI.create("file:///"), hadoop).setWriteChecksum(false);
    table = TableLoader.fromHadoopTable(location, hadoop);
    table.open();
    Table target = table.loadTable();
    List<Types.NestedField> columns = new ArrayList<>(target.schema().columns());
    columns.add(Types.NestedField.required(10_000, "row_kind", Types.StringType.get()));

    StreamExecutionEnvironment environment = StreamExecutionEnvironment.getExecutionEnvironment(settings);
    environment.setParallelism(PARALLELISM);
    environment.enableCheckpointing(TimeUnit.DAYS.toMillis(1));
    DataStream<RowData> changes =
        environment.addSource(
            new ChangeFiles(new Schema(columns)),
            "changes",
            InternalTypeInfo.of(FlinkSchemaUtil.convert(target.schema())));
    IcebergSink.Builder sink =
        IcebergSink.forRowData(changes)
            .tableLoader(table)
            .equalityFieldColumns(List.of("id"))
            .upsert(form.equals("upsert"))
            .writeParallelism(PARALLELISM)
            .set("distribution-mode", form.equals("upsert") ? "hash" : "none");
    if (!maintenance.equals("none")) {
      sink.set("flink-maintenance.rate-limit-seconds", "1");
      sink.set("flink-maintenance.lock-check-delay-seconds", "1");
    }
    if (maintenance.equals("rewrite")) {
      sink.set("flink-maintenance.rewrite.enabled", "true");
      sink.set("compaction-enabled", "true");
      sink.set("flink-maintenance.rewrite.schedule.commit-count", "5");
      sink.set("flink-maintenance.rewrite.delete-file-threshold", "1");
    } else if (maintenance.equals("convert")) {
      sink.set("flink-maintenance.convert-equality-deletes.enabled", "true");
    }
    sink.append();
    JobGraph graph = environment.getStreamGraph().getJobGraph();
    job = graph.getJobID();
    cluster.submitJob(graph).get(MOST_SECONDS, TimeUnit.SECONDS);
    while (!cluster.getJobStatus(job).get().name().equals("RUNNING") || !allTasksRun()) {
      Thread.sleep(20);
    }
  }

  private boolean allTasksRun() throws Exception {
    return cluster
        .getExecutionGraph(job)
        .get()
        .getAllExecutionVertices()
        .iterator()
        .hasNext()
        && java.util.stream.StreamSupport.stream(
                cluster.getExecutionGraph(job).get().getAllExecutionVertices().spliterator(), false)
            .allMatch(each -> each.getExecutionState().name().equals("RUNNING"));
  }

  private double batch(String[] words) throws Exception {
    long started = System.nanoTime();
    unread = new CountDownLatch(words.length - 1);
    for (int file = 1; file < words.length; file++) {
      FILES.get((file - 1) % PARALLELISM).add(words[file]);
    }
    while (!unread.await(1, TimeUnit.SECONDS)) {
      checkAlive();
    }
    long checkpoint =
        cluster.triggerCheckpoint(job, CheckpointType.FULL).get(MOST_SECONDS, TimeUnit.SECONDS);
    CompletableFuture<Long> commit = COMMITTED.computeIfAbsent(checkpoint, id -> new CompletableFuture<>());
    return (commit.get(MOST_SECONDS, TimeUnit.SECONDS) - started) / 1e9;
  }

  private void checkAlive() throws Exception {
    if (cluster.getJobStatus(job).get().isTerminalState()) {
      throw new IllegalStateException("the job has ended: " + cluster.getJobStatus(job).get());
    }
  }

  private double settle(double seconds) throws Exception {
    long started = System.nanoTime();
    while (!maintenance.equals("none") && (System.nanoTime() - started) / 1e9 < seconds) {
      Map<String, String> summary = table.loadTable().currentSnapshot().summary();
      boolean converted = "0".equals(summary.getOrDefault(SnapshotSummary.TOTAL_EQ_DELETES_PROP, "0"));
      boolean quiet = (System.nanoTime() - lastCommit) / 1e9 > 3;
      if (maintenance.equals("convert") ? converted : quiet) {
        break;
      }
      Thread.sleep(20);
    }
    return (System.nanoTime() - started) / 1e9;
  }
}
