import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.nio.file.Files;
import java.nio.file.Path;
import org.apache.hadoop.hive.conf.HiveConf;
import org.apache.hadoop.hive.metastore.HiveMetaStore;
import org.apache.hadoop.hive.metastore.IHMSHandler;
import org.apache.hadoop.hive.metastore.RetryingHMSHandler;
import org.apache.hadoop.hive.metastore.TSetIpAddressProcessor;
import org.apache.hadoop.hive.metastore.txn.TxnDbUtil;
import org.apache.thrift.protocol.TBinaryProtocol;
import org.apache.thrift.server.TThreadPoolServer;
import org.apache.thrift.transport.TServerSocket;

/** Hive's metastore on the loopback interface only: its own main class listens on every one. */
public class HiveMetastore {
  /** Arguments: the port, the folder of the database, the folder of the tables. */
  public static void main(String[] arguments) throws Exception {
    boolean isNew = !Files.exists(Path.of(arguments[1]));
    HiveConf settings = new HiveConf();
    settings.set("javax.jdo.option.ConnectionURL", "jdbc:derby:;create=true;databaseName=" + arguments[1]);
    settings.set("hive.metastore.warehouse.dir", arguments[2]);
    settings.set("datanucleus.schema.autoCreateAll", "true");
    settings.set("hive.metastore.schema.verification", "false");
    settings.set("hive.metastore.try.direct.sql", "false");
    settings.set("datanucleus.connectionPoolingType", "HIKARICP");
    TxnDbUtil.setConfValues(settings);
    IHMSHandler handler =
        RetryingHMSHandler.getProxy(settings, new HiveMetaStore.HMSHandler("metastore", settings, false), false);
    handler.init();
    if (isNew) {
      TxnDbUtil.prepDb(settings); // the tables of Hive's locks, which Iceberg takes
    }
    InetSocketAddress address = new InetSocketAddress(InetAddress.getLoopbackAddress(), Integer.parseInt(arguments[0]));
    new TThreadPoolServer(
            new TThreadPoolServer.Args(new TServerSocket(address))
                .processor(new TSetIpAddressProcessor<>(handler))
                .protocolFactory(new TBinaryProtocol.Factory()))
        .serve();
  }
}
