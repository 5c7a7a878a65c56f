import com.fasterxml.jackson.databind.ObjectReader;
import java.sql.Connection;
import java.sql.DriverManager;
import java.util.Map;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.api.common.functions.RichFlatMapFunction;
import org.apache.flink.api.common.serialization.AbstractDeserializationSchema;
import org.apache.flink.api.common.state.ValueState;
import org.apache.flink.api.common.state.ValueStateDescriptor;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.java.tuple.Tuple2;
import org.apache.flink.api.java.tuple.Tuple4;
import org.apache.flink.api.java.tuple.Tuple5;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.connector.jdbc.JdbcConnectionOptions.JdbcConnectionOptionsBuilder;
import org.apache.flink.connector.jdbc.JdbcExecutionOptions;
import org.apache.flink.connector.jdbc.core.datastream.sink.JdbcSink;
import org.apache.flink.connector.kafka.source.KafkaSource;
import org.apache.flink.connector.kafka.source.enumerator.initializer.OffsetsInitializer;
import org.apache.flink.core.execution.CheckpointingMode;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.KeyedProcessFunction;
import org.apache.flink.util.Collector;

/** One row per account, folded in Flink's keyed state and written with its JDBC sink. Arguments: brokers, topic, JDBC URL, folder. */
public final class Flink {
    private static final String TABLE = "create table balances (account text collate \"C\" primary key, version bigint,"
            + " cents bigint, count bigint, at bigint)";
    private static final String UPSERT =
            "insert into balances (account, version, cents, count, at) values (?, ?, ?, ?, ?) on conflict (account) do update"
                    + " set version = excluded.version, cents = excluded.cents, count = excluded.count, at = excluded.at";
    /** When a row was last given to the driver: all run in this JVM. */
    private static final AtomicLong last = new AtomicLong();

    private static final AtomicLong written = new AtomicLong();

    public static void main(String[] arguments) throws Exception {
        Peer.endWithParent();
        try (Connection database = DriverManager.getConnection(arguments[2])) {
            database.createStatement().execute(TABLE);
        }
        Configuration settings = new Configuration();
        settings.setString("state.backend.type", "hashmap");
        settings.setString("execution.checkpointing.dir", "file://" + arguments[3] + "/checkpoints");
        settings.setString("taskmanager.memory.managed.size", "512m");
        settings.setString("taskmanager.memory.network.min", "128m");
        settings.setString("taskmanager.memory.network.max", "128m");
        settings.setString("pipeline.object-reuse", "true");
        StreamExecutionEnvironment environment = StreamExecutionEnvironment.createLocalEnvironment(2, settings);
        environment.enableCheckpointing(1000, CheckpointingMode.EXACTLY_ONCE);

        KafkaSource<byte[]> log = KafkaSource.<byte[]>builder()
                .setBootstrapServers(arguments[0])
                .setTopics(arguments[1])
                .setGroupId("flink")
                .setStartingOffsets(OffsetsInitializer.earliest())
                .setBounded(OffsetsInitializer.latest())
                .setProperty("max.poll.records", "5000")
                .setProperty("max.partition.fetch.bytes", "8388608")
                .setValueOnlyDeserializer(new Bytes())
                .build();
        JdbcExecutionOptions batches = JdbcExecutionOptions.builder()
                .withBatchSize(5000)
                .withBatchIntervalMs(200)
                .withMaxRetries(3)
                .build();
        environment
                .fromSource(log, WatermarkStrategy.noWatermarks(), "log")
                .flatMap(new Decode())
                .keyBy(movement -> movement.f0, Types.STRING)
                .process(new Fold())
                // rows are upserted with all their values: at least once has the effect of exactly once
                .sinkTo(JdbcSink.<Tuple5<String, Long, Long, Long, Long>>builder()
                        .withQueryStatement(UPSERT, (statement, row) -> {
                            statement.setString(1, row.f0);
                            statement.setLong(2, row.f1);
                            statement.setLong(3, row.f2);
                            statement.setLong(4, row.f3);
                            statement.setLong(5, row.f4);
                            written.incrementAndGet();
                            last.set(System.nanoTime());
                        })
                        .withExecutionOptions(batches)
                        .buildAtLeastOnce(new JdbcConnectionOptionsBuilder()
                                .withUrl(arguments[2])
                                .withDriverName("org.postgresql.Driver")
                                .build()));
        double jobSeconds = environment.execute("balances").getNetRuntime() / 1e3;
        Peer.tell(written.get(), last.get(), Map.of(), Map.of("job_s", jobSeconds));
        System.exit(0);
    }

    private static final class Bytes extends AbstractDeserializationSchema<byte[]> {
        @Override
        public byte[] deserialize(byte[] value) {
            return value;
        }
    }

    /** (account, version, change in cents, sequence number) of each commit. */
    private static final class Decode extends RichFlatMapFunction<byte[], Tuple4<String, Long, Long, Long>> {
        private transient ObjectReader commits;

        @Override
        public void open(OpenContext context) {
            commits = Peer.commits();
        }

        @Override
        public void flatMap(byte[] value, Collector<Tuple4<String, Long, Long, Long>> out) throws Exception {
            Peer.begin();
            Peer.Commit commit = commits.readValue(value);
            if (commit.stream != null) {
                out.collect(Tuple4.of(commit.account(), commit.version, commit.change(), commit.seq));
            }
        }
    }

    /** (account, version, cents, count, sequence number) after each commit. */
    private static final class Fold
            extends KeyedProcessFunction<String, Tuple4<String, Long, Long, Long>, Tuple5<String, Long, Long, Long, Long>> {
        private transient ValueState<Tuple2<Long, Long>> sums;

        @Override
        public void open(OpenContext context) {
            sums = getRuntimeContext()
                    .getState(new ValueStateDescriptor<>("sums", Types.TUPLE(Types.LONG, Types.LONG)));
        }

        @Override
        public void processElement(
                Tuple4<String, Long, Long, Long> movement,
                Context context,
                Collector<Tuple5<String, Long, Long, Long, Long>> out)
                throws Exception {
            Tuple2<Long, Long> sum = sums.value();
            if (sum == null) sum = Tuple2.of(0L, 0L);
            sum.f0 += movement.f2;
            sum.f1++;
            sums.update(sum);
            out.collect(Tuple5.of(movement.f0, movement.f1, sum.f0, sum.f1, movement.f3));
        }
    }
}
